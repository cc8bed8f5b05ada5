//! Paged lists: `?limit=` and `?cursor=` in, `{"data":[…],"next_cursor":…}` out.
//! Invariant: every page is bounded, and a cursor that we did not issue is rejected.

use data_encoding::BASE64URL_NOPAD;
pub(crate) use postrider_proto::api::Page;
use postrider_proto::limits::{LIST_PAGE_DEFAULT, LIST_PAGE_MAX};
use serde::Deserialize;

use crate::http::problem::Problem;

const CURSOR_BYTES_MAX: usize = 400;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PageQuery {
    limit: Option<String>,
    cursor: Option<String>,
}

impl PageQuery {
    pub(crate) fn limit(&self) -> Result<i64, Problem> {
        limit(self.limit.as_deref())
    }

    pub(crate) fn after<K: Position>(&self) -> Result<Option<K>, Problem> {
        after(self.cursor.as_deref())
    }
}

/// The position of the last entry already returned.
pub(crate) fn after<K: Position>(cursor: Option<&str>) -> Result<Option<K>, Problem> {
    cursor.map(decode).transpose()
}

pub(crate) fn limit(text: Option<&str>) -> Result<i64, Problem> {
    match text {
        None => Ok(LIST_PAGE_DEFAULT),
        Some(text) => text
            .parse()
            .ok()
            .filter(|limit| (1..=LIST_PAGE_MAX).contains(limit))
            .ok_or_else(|| {
                Problem::bad_request(format!(
                    "Query parameter `limit` must be a number from 1 to {LIST_PAGE_MAX}."
                ))
            }),
    }
}

/// `rows` has up to `limit` + 1 entries: the extra one means that there is a next page.
pub(crate) fn cut<T, K: Position>(mut rows: Vec<T>, limit: i64, position: impl Fn(&T) -> K) -> Page<T> {
    let more = rows.len() as i64 > limit;
    rows.truncate(limit as usize);
    let next_cursor = rows.last().filter(|_| more).map(|last| encode(&position(last)));
    Page {
        data: rows,
        next_cursor,
    }
}

/// A position in a list that can be written as text and parsed again.
pub(crate) trait Position: Sized {
    fn write(&self) -> String;
    fn read(text: &str) -> Option<Self>;
}

impl Position for String {
    fn write(&self) -> String {
        self.clone()
    }

    fn read(text: &str) -> Option<Self> {
        (!text.contains('\0')).then(|| text.to_owned())
    }
}

macro_rules! position_by_text {
    ($($type:ty),+) => {$(
        impl Position for $type {
            fn write(&self) -> String {
                self.to_string()
            }

            fn read(text: &str) -> Option<Self> {
                text.parse().ok()
            }
        }
    )+};
}
position_by_text!(i32, i64, uuid::Uuid, postrider_proto::DeliveryId);

pub(crate) fn encode<K: Position>(position: &K) -> String {
    BASE64URL_NOPAD.encode(position.write().as_bytes())
}

pub(crate) fn decode<K: Position>(cursor: &str) -> Result<K, Problem> {
    let read = || {
        let bytes = BASE64URL_NOPAD.decode(cursor.as_bytes()).ok()?;
        K::read(std::str::from_utf8(&bytes).ok()?)
    };
    (cursor.len() <= CURSOR_BYTES_MAX)
        .then(read)
        .flatten()
        .ok_or_else(|| Problem::bad_request("Invalid cursor. Pass the `next_cursor` of the previous page."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_proto::{DeliveryId, EndpointId, EventId};

    #[test]
    fn a_cursor_reads_back_and_a_forged_one_does_not() {
        let id = DeliveryId {
            event: EventId(uuid::Uuid::from_u128(7)),
            endpoint: EndpointId(-3),
        };
        assert_eq!(decode::<DeliveryId>(&encode(&id)).ok(), Some(id));
        assert_eq!(decode::<i64>(&encode(&42_i64)).ok(), Some(42));
        for forged in ["", "!", "AAAA", &"A".repeat(10_000)] {
            assert!(decode::<DeliveryId>(forged).is_err(), "{forged:.20}");
            assert!(decode::<i64>(forged).is_err(), "{forged:.20}");
        }
        assert!(decode::<String>(&BASE64URL_NOPAD.encode(b"a\0")).is_err());
    }

    #[test]
    fn a_limit_has_bounds() {
        for good in ["1", "1000"] {
            assert!(limit(Some(good)).is_ok(), "{good}");
        }
        for bad in ["0", "1001", "-1", "1000000000", "99999999999999999999", "x", ""] {
            assert!(limit(Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_one_over_the_limit_says_that_there_is_more() {
        let page = cut(vec![3, 2, 1], 2, |n: &i64| *n);
        assert_eq!(page.data, [3, 2]);
        assert_eq!(page.next_cursor, Some(encode(&2_i64)));
        assert_eq!(cut(vec![2, 1], 2, |n: &i64| *n).next_cursor, None);
    }
}
