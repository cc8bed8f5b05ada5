//! Parts of pages that come anew while they are looked at, by server-sent events.
//! Invariants: the number of streams is bounded; none outlives the program's stop, and none lives long enough to outlive
//! its session by much: the browser asks again, and is asked who it is.

use std::{convert::Infallible, future::Future, sync::Arc, time::Duration};

use axum::response::sse::{Event, KeepAlive, Sse};
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Instant, sleep},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::problem::Problem;

const STREAMS_MAX: usize = 512;
const LIFE_MAX: Duration = Duration::from_secs(15 * 60);
/// Parts that are rendered at a time: their statements leave most connections to requests.
const RENDERS_MAX: usize = 2;
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// What streams share.
#[derive(Clone)]
pub(crate) struct Live {
    places: Arc<Semaphore>,
    renders: Arc<Semaphore>,
    stop: CancellationToken,
}

impl Default for Live {
    fn default() -> Self {
        Self::until(CancellationToken::new())
    }
}

/// The next content of the part.
pub(crate) enum Content {
    Html(String),
    /// This, and nothing after it.
    Last(String),
}

pub(crate) type Stream = Sse<axum::response::sse::KeepAliveStream<ReceiverStream<Result<Event, Infallible>>>>;

impl Live {
    pub(crate) fn until(stop: CancellationToken) -> Self {
        Self {
            places: Arc::new(Semaphore::new(STREAMS_MAX)),
            renders: Arc::new(Semaphore::new(RENDERS_MAX)),
            stop,
        }
    }

    /// Renders the part every so often, and sends it when it is another.
    pub(crate) fn stream<F>(
        &self,
        every: Duration,
        mut render: impl FnMut() -> F + Send + 'static,
    ) -> Result<Stream, Problem>
    where
        F: Future<Output = Result<Content, Problem>> + Send,
    {
        let place = self
            .places
            .clone()
            .try_acquire_owned()
            .map_err(|_| Problem::busy())?;
        let (out, sent) = mpsc::channel(1);
        let stop = self.stop.clone();
        let renders = self.renders.clone();
        tokio::spawn(async move {
            let _place = place;
            let ends = Instant::now() + LIFE_MAX;
            let mut before = String::new();
            while Instant::now() < ends {
                tokio::select! {
                    () = sleep(every) => {}
                    () = stop.cancelled() => return,
                    () = out.closed() => return,
                }
                // What is wrong for a moment must not end the page's life; the browser would ask again anyway.
                let turn = renders.acquire().await;
                let rendered = render().await;
                drop(turn);
                let (html, last) = match rendered {
                    Ok(Content::Html(html)) => (html, false),
                    Ok(Content::Last(html)) => (html, true),
                    Err(_) => continue,
                };
                if html != before {
                    if out
                        .send(Ok(Event::default().data(plain_lines(&html))))
                        .await
                        .is_err()
                    {
                        return;
                    }
                    before = html;
                }
                if last {
                    let _ = out.send(Ok(Event::default().event("end").data("end"))).await;
                    return;
                }
            }
        });
        Ok(Sse::new(ReceiverStream::new(sent)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
    }
}

/// A carriage return would end a line of the stream. Customers' bodies have them.
fn plain_lines(html: &str) -> String {
    html.replace('\r', "&#13;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::response::IntoResponse;
    use http_body_util::BodyExt;

    #[tokio::test]
    async fn a_part_is_sent_when_it_changed_and_the_stream_ends_with_the_last() {
        let mut contents = ["a\r\nb", "a\r\nb", "c"].into_iter();
        let stream = Live::default().stream(Duration::from_millis(1), move || {
            let content = match contents.next() {
                Some(html) => Content::Html(html.to_owned()),
                None => Content::Last("d".to_owned()),
            };
            async { Ok(content) }
        });
        let body = stream.expect("a stream").into_response().into_body();
        let text =
            String::from_utf8(body.collect().await.expect("an end").to_bytes().to_vec()).expect("text");
        assert_eq!(
            text,
            "data: a&#13;\ndata: b\n\ndata: c\n\ndata: d\n\nevent: end\ndata: end\n\n"
        );
    }

    #[tokio::test]
    async fn a_stop_ends_every_stream() {
        let stop = CancellationToken::new();
        let live = Live::until(stop.clone());
        let stream = live.stream(Duration::from_secs(3_600), || async {
            Ok(Content::Html(String::new()))
        });
        stop.cancel();
        let body = stream.expect("a stream").into_response().into_body();
        assert!(body.collect().await.expect("an end").to_bytes().is_empty());
        for _ in 0..100 {
            if live.places.available_permits() == STREAMS_MAX {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("its place is free again");
    }
}
