//! The way of replies to Envoy. Whoever makes them and whoever sends them are one task, that of the gRPC stream: a task of its
//! own for the exchange would be woken for every message and wake the other for every reply, which costs more than most
//! messages do. What an exchange holds is inside that task, so whatever ends the stream releases it by drop; what had happened
//! by then is heard first. While Envoy does not take what was sent to it, the exchange stands still.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use parking_lot::Mutex;
use tokio_stream::Stream;
use tonic::Status;

/// Replies that may wait for Envoy to take them; beyond it nothing more is read, which is what flow control is for.
const REPLIES: usize = 16;

/// Where an exchange puts its replies.
#[derive(Clone, Default)]
pub(super) struct Replies(Arc<Mutex<VecDeque<ProcessingResponse>>>);

impl Replies {
    /// Sends one reply, once there is room.
    pub(super) async fn send(&self, reply: ProcessingResponse) {
        // Nobody is woken: who takes replies goes on with who makes them as soon as none is left.
        poll_fn(|_| {
            if self.0.lock().len() < REPLIES {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        self.0.lock().push_back(reply);
    }

    fn take(&self) -> Option<ProcessingResponse> {
        self.0.lock().pop_front()
    }
}

type Work = Pin<Box<dyn Future<Output = Result<(), Status>> + Send>>;

/// An exchange at work, as the stream of its replies.
pub struct Replying {
    replies: Replies,
    /// None once it is over.
    work: Option<Work>,
    /// The status that ends the stream, after all replies.
    failed: Option<Status>,
}

impl Replying {
    pub(super) fn new<F>(work: impl FnOnce(Replies) -> F) -> Self
    where
        F: Future<Output = Result<(), Status>> + Send + 'static,
    {
        let replies = Replies::default();
        Self {
            work: Some(Box::pin(work(replies.clone()))),
            replies,
            failed: None,
        }
    }

    fn go_on(&mut self, cx: &mut Context<'_>) {
        let Some(work) = &mut self.work else { return };
        // A panic ends the stream as if there was nothing more to say: Envoy would take a reset for an error of the request.
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx)));
        if let Ok(Poll::Pending) = polled {
            return;
        }
        self.work = None;
        if let Ok(Poll::Ready(Err(status))) = polled {
            self.failed = Some(status);
        }
    }
}

impl Drop for Replying {
    /// Where Envoy resets the stream, which is how it ends most, nobody polls any more, and what came just before would be
    /// lost: the last messages, and that another filter saw the first token.
    fn drop(&mut self) {
        self.replies.0.lock().clear();
        let last = pin!(tokio::task::unconstrained(poll_fn(|cx| {
            self.go_on(cx);
            Poll::Ready(())
        })));
        _ = last.poll(&mut Context::from_waker(Waker::noop()));
    }
}

impl Stream for Replying {
    type Item = Result<ProcessingResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(reply) = self.replies.take() {
            return Poll::Ready(Some(Ok(reply)));
        }
        self.go_on(cx);
        match self.replies.take() {
            Some(reply) => Poll::Ready(Some(Ok(reply))),
            None if self.work.is_none() => Poll::Ready(self.failed.take().map(Err)),
            None => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio_stream::StreamExt as _;

    use super::*;

    fn numbered(number: i64) -> ProcessingResponse {
        super::super::mutation::hold(Duration::from_secs(number.unsigned_abs()))
    }

    fn number(reply: &ProcessingResponse) -> i64 {
        reply.override_message_timeout.as_ref().unwrap().seconds
    }

    #[tokio::test]
    async fn all_replies_come_in_their_order_and_then_the_end() {
        let replying = Replying::new(|replies| async move {
            for at in 0..100 {
                replies.send(numbered(at)).await;
                if at % 7 == 0 {
                    tokio::task::yield_now().await;
                }
            }
            Ok(())
        });
        let numbers: Vec<_> = replying
            .map(|reply| number(&reply.unwrap()))
            .collect()
            .await;
        assert_eq!(numbers, (0..100).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn nothing_is_made_before_there_is_room_for_it() {
        let made = Arc::new(Mutex::new(0));
        let counted = made.clone();
        let mut replying = Replying::new(|replies| async move {
            for at in 0..100 {
                replies.send(numbered(at)).await;
                *counted.lock() += 1;
            }
            Ok(())
        });
        replying.next().await.unwrap().unwrap();
        assert_eq!(*made.lock(), REPLIES);
    }

    #[tokio::test]
    async fn what_had_happened_before_nobody_listened_is_heard() {
        let (tell, told) = tokio::sync::oneshot::channel();
        let heard = Arc::new(Mutex::new(None));
        let hears = heard.clone();
        let mut replying = Replying::new(|replies| async move {
            replies.send(numbered(1)).await;
            let said = told.await;
            // What nobody took leaves room.
            for at in 0..REPLIES as i64 {
                replies.send(numbered(at)).await;
            }
            *hears.lock() = said.ok();
            Ok(())
        });
        replying.next().await.unwrap().unwrap();
        tell.send("done").unwrap();
        assert_eq!(*heard.lock(), None);
        drop(replying);
        assert_eq!(*heard.lock(), Some("done"));
    }

    #[tokio::test]
    async fn a_panic_ends_the_stream_behind_what_was_said() {
        let replying = Replying::new(|replies| async move {
            replies.send(numbered(1)).await;
            panic!("on purpose");
        });
        let numbers: Vec<_> = replying
            .map(|reply| number(&reply.unwrap()))
            .collect()
            .await;
        assert_eq!(numbers, [1]);
    }

    #[tokio::test]
    async fn an_error_status_follows_the_replies() {
        let mut replying = Replying::new(|replies| async move {
            replies.send(numbered(1)).await;
            Err(Status::internal("no message"))
        });
        assert_eq!(number(&replying.next().await.unwrap().unwrap()), 1);
        assert_eq!(
            replying.next().await.unwrap().unwrap_err().message(),
            "no message"
        );
        assert!(replying.next().await.is_none());
    }

    #[tokio::test]
    async fn who_stops_listening_ends_the_work() {
        let held = Arc::new(());
        let inside = held.clone();
        let mut replying = Replying::new(|replies| async move {
            let _inside = inside;
            replies.send(numbered(1)).await;
            std::future::pending().await
        });
        replying.next().await.unwrap().unwrap();
        assert_eq!(Arc::strong_count(&held), 2);
        drop(replying);
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
