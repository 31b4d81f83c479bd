//! The stream of replies to Envoy. The exchange runs inside the task of the gRPC stream. A separate
//! task would cost a wakeup for every message and every reply, which is more than the work for most
//! messages. The gRPC task owns the resources of the exchange, so any end of the stream releases
//! them, after one last poll for the messages received before. If Envoy does not read its replies,
//! the exchange stops.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio_stream::Stream;
use tonic::Status;

use super::returned_piece::ExtProcReply;

/// Maximum number of queued replies. A full queue stops the exchange from reading, which is HTTP/2
/// flow control.
const MAX_QUEUED_REPLIES: usize = 16;

/// Queue for the replies of an exchange.
#[derive(Clone, Default)]
pub(super) struct ResponseSink(Arc<Mutex<VecDeque<ExtProcReply>>>);

impl ResponseSink {
    /// Queues one reply as soon as there is room.
    pub(super) async fn send(&self, reply: impl Into<ExtProcReply>) {
        // No waker is needed: the stream polls the exchange again as soon as the queue is empty.
        poll_fn(|_| {
            if self.0.lock().len() < MAX_QUEUED_REPLIES {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        self.0.lock().push_back(reply.into());
    }

    fn pop(&self) -> Option<ExtProcReply> {
        self.0.lock().pop_front()
    }
}

type ExchangeTask = Pin<Box<dyn Future<Output = Result<(), Status>> + Send>>;

/// A running exchange, as the stream of its replies.
pub struct ResponseStream {
    sink: ResponseSink,
    /// `None` after the end of the exchange.
    task: Option<ExchangeTask>,
    /// The status that ends the stream, after all replies.
    failed: Option<Status>,
}

impl ResponseStream {
    pub(super) fn new<F>(task: impl FnOnce(ResponseSink) -> F) -> Self
    where
        F: Future<Output = Result<(), Status>> + Send + 'static,
    {
        let sink = ResponseSink::default();
        Self {
            task: Some(Box::pin(task(sink.clone()))),
            sink,
            failed: None,
        }
    }

    fn poll_task(&mut self, cx: &mut Context<'_>) {
        let Some(task) = &mut self.task else { return };
        // A panic ends the stream without an error status, because Envoy fails the request after an
        // error status.
        let polled = catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(cx)));
        if let Ok(Poll::Pending) = polled {
            return;
        }
        self.task = None;
        if let Ok(Poll::Ready(Err(status))) = polled {
            self.failed = Some(status);
        }
    }
}

impl Drop for ResponseStream {
    /// Polls the exchange once more. Envoy ends most streams with a reset, after which the stream
    /// is not polled again. The last poll handles the messages received just before, and a first
    /// token that another filter observed.
    fn drop(&mut self) {
        self.sink.0.lock().clear();
        let last = pin!(tokio::task::unconstrained(poll_fn(|cx| {
            self.poll_task(cx);
            Poll::Ready(())
        })));
        _ = last.poll(&mut Context::from_waker(Waker::noop()));
    }
}

impl Stream for ResponseStream {
    type Item = Result<ExtProcReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(reply) = self.sink.pop() {
            return Poll::Ready(Some(Ok(reply)));
        }
        self.poll_task(cx);
        match self.sink.pop() {
            Some(reply) => Poll::Ready(Some(Ok(reply))),
            None if self.task.is_none() => Poll::Ready(self.failed.take().map(Err)),
            None => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio_stream::StreamExt as _;

    use super::*;

    fn numbered(number: i64) -> ExtProcReply {
        super::super::mutation::extend_timeout(Duration::from_secs(number.unsigned_abs())).into()
    }

    fn number(reply: &ExtProcReply) -> i64 {
        let ExtProcReply::Message(reply) = reply else {
            panic!("a message")
        };
        reply.override_message_timeout.as_ref().unwrap().seconds
    }

    #[tokio::test]
    async fn replies_arrive_in_order() {
        let stream = ResponseStream::new(|sink| async move {
            for at in 0..100 {
                sink.send(numbered(at)).await;
                if at % 7 == 0 {
                    tokio::task::yield_now().await;
                }
            }
            Ok(())
        });
        let numbers: Vec<_> = stream.map(|reply| number(&reply.unwrap())).collect().await;
        assert_eq!(numbers, (0..100).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn full_queue_stops_the_exchange() {
        let sent_replies = Arc::new(Mutex::new(0));
        let counter = sent_replies.clone();
        let mut stream = ResponseStream::new(|sink| async move {
            for at in 0..100 {
                sink.send(numbered(at)).await;
                *counter.lock() += 1;
            }
            Ok(())
        });
        stream.next().await.unwrap().unwrap();
        assert_eq!(*sent_replies.lock(), MAX_QUEUED_REPLIES);
    }

    #[tokio::test]
    async fn drop_polls_the_exchange_once_more() {
        let (received_tx, received_rx) = tokio::sync::oneshot::channel();
        let result = Arc::new(Mutex::new(None));
        let result_slot = result.clone();
        let mut stream = ResponseStream::new(|sink| async move {
            sink.send(numbered(1)).await;
            let received = received_rx.await;
            // Drop discards the queued replies, so there is room for these.
            for at in 0..MAX_QUEUED_REPLIES as i64 {
                sink.send(numbered(at)).await;
            }
            *result_slot.lock() = received.ok();
            Ok(())
        });
        stream.next().await.unwrap().unwrap();
        received_tx.send("done").unwrap();
        assert_eq!(*result.lock(), None);
        drop(stream);
        assert_eq!(*result.lock(), Some("done"));
    }

    #[tokio::test]
    async fn panic_ends_stream_after_queued_replies() {
        let stream = ResponseStream::new(|sink| async move {
            sink.send(numbered(1)).await;
            panic!("on purpose");
        });
        let numbers: Vec<_> = stream.map(|reply| number(&reply.unwrap())).collect().await;
        assert_eq!(numbers, [1]);
    }

    #[tokio::test]
    async fn error_status_follows_queued_replies() {
        let mut stream = ResponseStream::new(|sink| async move {
            sink.send(numbered(1)).await;
            Err(Status::internal("no message"))
        });
        assert_eq!(number(&stream.next().await.unwrap().unwrap()), 1);
        assert_eq!(
            stream.next().await.unwrap().unwrap_err().message(),
            "no message"
        );
        assert!(stream.next().await.is_none());
    }

    #[tokio::test]
    async fn dropped_stream_ends_the_exchange() {
        let held = Arc::new(());
        let inside = held.clone();
        let mut stream = ResponseStream::new(|sink| async move {
            let _inside = inside;
            sink.send(numbered(1)).await;
            std::future::pending().await
        });
        stream.next().await.unwrap().unwrap();
        assert_eq!(Arc::strong_count(&held), 2);
        drop(stream);
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
