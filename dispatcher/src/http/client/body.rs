//! A request's body, which hyper asks for right before it writes: the last moment to find out that nothing may be sent any
//! more. Between a check further up and the write lie two tasks, and a process that is frozen there would send when it wakes.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

use crate::ownership::lease::Right;

pub(super) struct Body {
    bytes: Bytes,
    right: Option<Right>,
}

#[derive(Debug, thiserror::Error)]
#[error("the lease is over")]
pub(super) struct LeaseOver;

impl Body {
    pub(super) fn new(bytes: Bytes, right: Option<Right>) -> Self {
        Self { bytes, right }
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = LeaseOver;

    /// The head waits in a buffer for the first of the body: an error here, and the connection ends with nothing sent.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, LeaseOver>>> {
        if self.bytes.is_empty() {
            return Poll::Ready(None);
        }
        if self.right.as_ref().is_some_and(|right| !right.is_valid()) {
            return Poll::Ready(Some(Err(LeaseOver)));
        }
        Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.len() as u64)
    }
}
