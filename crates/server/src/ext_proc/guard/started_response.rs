//! A response whose headers have arrived, and the usage in its body.

use std::time::Instant;

use warmroute_core::load::CompleteOutput;
use warmroute_tokens::openai::usage::{ResponseEncoding, TokenUsage, UsageScanner};

use super::ExchangeEnd;
use crate::ext_proc::headers::ResponseHead;
use crate::ext_proc::response_content::ResponseContent;

/// A response whose headers have arrived.
pub(super) struct StartedResponse {
    pub(super) head: ResponseHead,
    /// Content of the response, observed by this filter or by the probe filter.
    pub(super) content: ResponseContent,
    /// Time of the first token of a streamed response.
    pub(super) first_token_at: Option<Instant>,
    /// Whether another worker than the chosen one sent the response.
    pub(super) is_served_elsewhere: bool,
    /// Scan of the body. `None` if it is not scanned.
    pub(super) scan: Option<Box<UsageScan>>,
}

/// Usage in the part of the body that was received.
pub(super) struct UsageScan {
    pub(super) scanner: UsageScanner,
    /// Output tokens reported to the load tracker so far, including the first one.
    reported_tokens: u64,
}

impl StartedResponse {
    pub(super) fn new(head: ResponseHead) -> Self {
        Self {
            head,
            content: ResponseContent::default(),
            first_token_at: None,
            is_served_elsewhere: false,
            scan: None,
        }
    }

    pub(super) fn is_success(&self) -> bool {
        (200..300).contains(&self.head.status)
    }

    /// Returns whether the response proves that the prompt's blocks are cached. The headers of an
    /// event stream do not: they precede the computation, and the client may disconnect before the
    /// first token.
    pub(super) fn proves_prefill(&self, end: ExchangeEnd) -> bool {
        let has_begun = match end {
            ExchangeEnd::Complete(_) => !self.content.excludes_prefill(),
            ExchangeEnd::Closed => {
                self.content == ResponseContent::Delivered || !self.head.is_event_stream
            }
            ExchangeEnd::Abandoned | ExchangeEnd::Immediate => false,
        };
        has_begun && self.is_success()
    }

    /// Records the first token. Returns whether its time was measured.
    pub(super) fn on_first_token(&mut self, is_observed: bool) -> bool {
        self.content = match (is_observed, self.head.is_event_stream) {
            (true, _) => ResponseContent::Delivered,
            (false, false) => ResponseContent::Assumed,
            (false, true) => self.content,
        };
        let is_measured = self.is_success() && is_observed && self.head.is_event_stream;
        if is_measured {
            self.first_token_at = Some(Instant::now());
        }
        is_measured
    }

    /// Scans a piece of the body. Returns the output tokens not yet reported to the load tracker. The
    /// usage at the end of a stream is not counted, because it may correct the number of tokens at
    /// once. A token has at least one byte.
    pub(super) fn scan(&mut self, chunk: &[u8]) -> Option<u64> {
        let is_event_stream = self.head.is_event_stream;
        let scan = self.scan.get_or_insert_with(|| {
            let encoding = if is_event_stream {
                ResponseEncoding::EventStream
            } else {
                ResponseEncoding::Document
            };
            Box::new(UsageScan {
                scanner: UsageScanner::new(encoding),
                reported_tokens: 1,
            })
        });
        let scanner = &mut scan.scanner;
        let had_usage = scanner.usage().is_some();
        let events = scanner.content_events();
        scanner.push(chunk);
        let is_final_usage = scanner.usage().is_some() && !had_usage;
        let has_content = scanner.content_events() > events;
        let generated = scanner.output_tokens();
        if !is_event_stream || !has_content || is_final_usage || generated <= scan.reported_tokens {
            return None;
        }
        let count = generated - scan.reported_tokens;
        scan.reported_tokens = generated;
        Some(count.min(chunk.len() as u64))
    }

    /// Returns the usage, if the body was scanned and contains one.
    pub(super) fn usage(&self) -> Option<TokenUsage> {
        self.scan.as_ref()?.scanner.usage()
    }

    /// Returns the output from which the latency is learned. With `gateway.observe: first_token`, the
    /// end of a stream is not observed, so a cancelled stream counts too.
    pub(super) fn complete_output(&self) -> Option<CompleteOutput> {
        let reported = self.usage().map(|usage| usage.completion_tokens);
        if self.head.is_event_stream {
            // The length has the unit of the learned steps: an event may have several tokens.
            let scan = self.scan.as_ref();
            let counted = scan.map(|scan| scan.reported_tokens);
            let tokens = counted.filter(|tokens| *tokens > 1).or(reported);
            Some(CompleteOutput::Stream { tokens })
        } else {
            let tokens = reported.filter(|tokens| *tokens > 0)?;
            Some(CompleteOutput::Unary { tokens })
        }
    }
}
