//! Live parts of pages, updated with server-sent events while a page is open.
//! Invariants: the number of streams is bounded, overall and per session, person and tenant. No stream outlives the
//! shutdown of the program, or its session by more than a few seconds.

use std::{convert::Infallible, future::Future, sync::Arc, time::Duration};

use askama::Template;
use axum::response::sse::{Event, KeepAlive, Sse};
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Instant, sleep},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::{Frame, Markup};
use crate::{
    Pool,
    auth::{Role, Session},
    http::{
        problem::Problem,
        slots::{Slot, Slots},
    },
    tables::sessions::Holder,
};

const STREAMS_MAX: usize = 512;
/// The remaining streams are reserved for the team.
const CUSTOMERS_STREAMS_MAX: usize = 384;
/// Each visible tab uses one.
const STREAMS_PER_SESSION_MAX: usize = 16;
/// Per person, or for all customers of a tenant together.
const STREAMS_PER_HOLDER_MAX: usize = 64;
/// How often a stream checks that its session is still open.
const SESSION_CHECK_EVERY: Duration = Duration::from_secs(4);
const RETRY_AFTER: Duration = Duration::from_secs(10);
const LIFE_MAX: Duration = Duration::from_secs(15 * 60);
/// Concurrent renders. The limit keeps most database connections free for requests.
const RENDERS_MAX: usize = 2;
const KEEP_ALIVE: Duration = Duration::from_secs(20);
const SETTLED_EVERY: Duration = Duration::from_secs(4);
/// How often a stream confirms parts that have not changed. A browser that hears nothing for a while (`app.js`) tells its
/// user that the page may be out of date.
const CONFIRM_EVERY: Duration = Duration::from_secs(4);

/// Why nothing is sent: a live part of every live page.
#[derive(Template)]
#[template(path = "hold.html")]
struct HoldPart {
    frame: Frame,
}

/// State shared by all streams.
#[derive(Clone)]
pub(crate) struct Live {
    sessions: Arc<Slots<[u8; 32]>>,
    customers: Arc<Slots<Holder>>,
    team: Arc<Slots<Holder>>,
    renders: Arc<Semaphore>,
    stop: CancellationToken,
}

/// The viewer of a stream.
struct Viewer {
    pool: Pool,
    session: Session,
    checked: Instant,
    _slots: (Slot<[u8; 32]>, Slot<Holder>),
}

impl Viewer {
    /// A database error does not end the stream; the session is checked again later.
    async fn has_left(&mut self) -> bool {
        if self.checked.elapsed() < SESSION_CHECK_EVERY {
            return false;
        }
        self.checked = Instant::now();
        match self.session.again(&self.pool).await {
            Ok(Some(session)) => self.session.hold = session.hold,
            Ok(None) => return true,
            Err(_) => {}
        }
        false
    }

    /// The part of every page that says why nothing is sent.
    fn hold(&self) -> String {
        let frame = Frame::new(self.session.clone(), "");
        Markup::of_part(&HoldPart { frame }).0
    }
}

impl Default for Live {
    fn default() -> Self {
        Self::until(CancellationToken::new())
    }
}

/// A rendered update.
pub(crate) enum Content {
    Html(String),
    /// What only another person's action changes, so that it is looked at less often.
    Settled(String),
}

pub(crate) type Stream = Sse<axum::response::sse::KeepAliveStream<ReceiverStream<Result<Event, Infallible>>>>;

impl Live {
    pub(crate) fn until(stop: CancellationToken) -> Self {
        Self {
            sessions: Slots::new(STREAMS_MAX, STREAMS_PER_SESSION_MAX),
            customers: Slots::new(CUSTOMERS_STREAMS_MAX, STREAMS_PER_HOLDER_MAX),
            team: Slots::new(STREAMS_MAX - CUSTOMERS_STREAMS_MAX, STREAMS_PER_HOLDER_MAX),
            renders: Arc::new(Semaphore::new(RENDERS_MAX)),
            stop,
        }
    }

    fn admit(&self, pool: &Pool, session: Session) -> Result<Viewer, Problem> {
        let (own, holder) = session.holders();
        let holders = match session.role {
            Role::Customer => &self.customers,
            Role::Admin | Role::Operator | Role::ReadOnly => &self.team,
        };
        let slots = self.sessions.take(Some(own)).zip(holders.take(Some(holder)));
        let slots = slots.ok_or_else(|| {
            Problem::too_many(
                "Too many live pages are open. Close some tabs and try again.",
                RETRY_AFTER,
            )
        })?;
        Ok(Viewer {
            pool: pool.clone(),
            session,
            checked: Instant::now(),
            _slots: slots,
        })
    }

    /// Renders the parts at once and then at an interval, and sends them when they have changed. At once, because a page
    /// that comes back from the background shows what was true when it went there.
    pub(crate) fn stream<F>(
        &self,
        pool: &Pool,
        session: Session,
        every: Duration,
        mut render: impl FnMut() -> F + Send + 'static,
    ) -> Result<Stream, Problem>
    where
        F: Future<Output = Result<Content, Problem>> + Send,
    {
        let mut viewer = self.admit(pool, session)?;
        let (out, sent) = mpsc::channel(1);
        let stop = self.stop.clone();
        let renders = self.renders.clone();
        tokio::spawn(async move {
            let ends = Instant::now() + LIFE_MAX;
            let (mut before, mut confirmed) = (String::new(), Instant::now());
            let mut wait = Duration::ZERO;
            while Instant::now() < ends {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    () = out.closed() => return,
                    () = sleep(wait) => {}
                }
                wait = every;
                if viewer.has_left().await {
                    let _ = out.send(Ok(named("signed-out"))).await;
                    return;
                }
                // A transient error must not end the stream; the browser would reconnect anyway.
                let turn = renders.acquire().await;
                let rendered = render().await;
                drop(turn);
                let html = match rendered {
                    Ok(Content::Html(html)) => html,
                    Ok(Content::Settled(html)) => {
                        wait = every.max(SETTLED_EVERY);
                        html
                    }
                    Err(_) => continue,
                };
                let html = html + &viewer.hold();
                let event = match html == before {
                    false => Some(Event::default().data(plain_lines(&html))),
                    true if confirmed.elapsed() >= CONFIRM_EVERY => Some(named("unchanged")),
                    true => None,
                };
                if let Some(event) = event {
                    if out.send(Ok(event)).await.is_err() {
                        return;
                    }
                    confirmed = Instant::now();
                }
                before = html;
            }
        });
        Ok(Sse::new(ReceiverStream::new(sent)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
    }
}

/// An event that is only a name.
fn named(name: &'static str) -> Event {
    Event::default().event(name).data(name)
}

/// A carriage return would end a line of the event stream, and customers' bodies may contain some.
fn plain_lines(html: &str) -> String {
    html.replace('\r', "&#13;")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use axum::response::IntoResponse;
    use http_body_util::BodyExt;

    /// A pool that never connects.
    fn pool() -> Pool {
        let pool = sqlx::PgPool::connect_lazy("postgres://nobody@127.0.0.1:1/none");
        pool.expect("a form").into()
    }

    const HOLD: &str = "<div data-part=\"hold\"></div>";

    #[tokio::test]
    async fn a_part_is_sent_when_it_changed_and_looked_at_less_often_when_it_is_settled() {
        let mut contents = ["a\r\nb", "a\r\nb", "c"].into_iter();
        let session = Session::of_customer(1, 1);
        let every = Duration::from_millis(1);
        let renders = Arc::new(AtomicUsize::new(0));
        let rendered = renders.clone();
        let stream = Live::default().stream(&pool(), session, every, move || {
            let content = match contents.next() {
                Some(html) => Content::Html(html.to_owned()),
                None => Content::Settled("d".to_owned()),
            };
            rendered.fetch_add(1, Ordering::Relaxed);
            async { Ok(content) }
        });
        let mut body = stream.expect("a stream").into_response().into_body();
        let wanted = "data: a&#13;\ndata: b~\n\ndata: c~\n\ndata: d~\n\n".replace('~', HOLD);
        let mut text = String::new();
        while text.len() < wanted.len() {
            let frame = body.frame().await.expect("more").expect("a frame");
            text += std::str::from_utf8(&frame.into_data().expect("data")).expect("text");
        }
        assert_eq!(text, wanted);
        tokio::time::sleep(20 * every).await;
        assert_eq!(renders.load(Ordering::Relaxed), 4);
    }

    fn open(live: &Live, session: Session) -> Result<Stream, Problem> {
        live.stream(&pool(), session, Duration::from_secs(3_600), || async {
            Ok(Content::Html(String::new()))
        })
    }

    #[tokio::test]
    async fn shutdown_ends_every_stream() {
        let stop = CancellationToken::new();
        let live = Live::until(stop.clone());
        let stream = open(&live, Session::of_customer(1, 1));
        stop.cancel();
        let body = stream.expect("a stream").into_response().into_body();
        assert!(body.collect().await.expect("an end").to_bytes().is_empty());
        for _ in 0..100 {
            if live.customers.taken() == (0, 0) && live.sessions.taken() == (0, 0) {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("its slots were not freed");
    }

    #[tokio::test]
    async fn neither_a_session_nor_a_tenant_can_use_up_all_streams() {
        let live = Live::default();
        let mut open_streams = Vec::new();
        for session in 0..20 {
            let before = open_streams.len();
            open_streams.extend((0..50).filter_map(|_| open(&live, Session::of_customer(1, session)).ok()));
            assert!(open_streams.len() - before <= STREAMS_PER_SESSION_MAX);
        }
        assert_eq!(open_streams.len(), STREAMS_PER_HOLDER_MAX);
        assert!(open(&live, Session::of_customer(2, 99)).is_ok());
    }
}
