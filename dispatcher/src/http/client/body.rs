//! A request body. hyper polls it right before writing: the last moment to notice that nothing may be sent any more.
//! Two tasks run between an earlier check and the write, and a process frozen there would send when it resumes.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

use crate::ownership::lease::SendPermission;

pub(super) struct Body {
    bytes: Bytes,
    permission: Option<SendPermission>,
}

#[derive(Debug, thiserror::Error)]
#[error("the lease has ended")]
pub(super) struct LeaseOver;

impl Body {
    pub(super) fn new(bytes: Bytes, permission: Option<SendPermission>) -> Self {
        Self { bytes, permission }
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = LeaseOver;

    /// The head is buffered until the first body frame: an error here closes the connection with nothing sent.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, LeaseOver>>> {
        if self.bytes.is_empty() {
            return Poll::Ready(None);
        }
        if self
            .permission
            .as_ref()
            .is_some_and(|permission| !permission.is_valid())
        {
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
