//! Ids as types, and their public form.

use std::{fmt, str::FromStr};

use data_encoding::{BASE32HEX_NOPAD, HEXLOWER};
use uuid::Uuid;

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[cfg_attr(feature = "sqlx", derive(sqlx::Type), sqlx(transparent))]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number_id!(
    /// A tenant's number in this database. Its public id is the slug.
    TenantId(i32)
);
number_id!(
    /// An event type's number in this database.
    TypeId(i32)
);
number_id!(
    /// An endpoint's number in this database.
    EndpointId(i32)
);
number_id!(
    /// A partition of the endpoints; the unit of ownership.
    Shard(i16)
);
number_id!(
    /// Counts the owners of a shard. A result is recorded only under the epoch that sent it.
    Epoch(i64)
);
number_id!(
    /// A bulk replay's number in this database.
    ReplayId(i64)
);
number_id!(
    /// An event's key: a UUIDv7, so that ids sort by time.
    EventId(Uuid)
);

impl EventId {
    /// Below every real id.
    pub const LOWEST: Self = Self(Uuid::nil());

    /// The id just below this one.
    pub fn pred(self) -> Self {
        Self(Uuid::from_u128(self.0.as_u128().saturating_sub(1)))
    }

    /// The lowest id of this millisecond.
    pub fn first_of(unix_ms: i64) -> Self {
        Self(Uuid::from_u128((unix_ms.max(0) as u128) << 80))
    }

    /// Milliseconds since 1970, encoded in the id.
    pub fn unix_ms(self) -> i64 {
        (self.0.as_u128() >> 80) as i64
    }

    /// The public id of an event whose producer chose none.
    pub fn generated(self) -> String {
        format!("evt_{}", HEXLOWER.encode(self.0.as_bytes()))
    }

    /// Parses what [`generated`](Self::generated) produced.
    pub fn from_generated(text: &str) -> Option<Self> {
        let hex = text.strip_prefix("evt_")?;
        let bytes = HEXLOWER.decode(hex.as_bytes()).ok()?;
        Some(Self(Uuid::from_slice(&bytes).ok()?))
    }
}

/// One event on its way to one endpoint, from the emit through every replay.
/// Its public form contains both numbers, so that it needs no table of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeliveryId {
    pub event: EventId,
    pub endpoint: EndpointId,
}

impl fmt::Display for DeliveryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = [0; 20];
        bytes[..16].copy_from_slice(self.event.0.as_bytes());
        bytes[16..].copy_from_slice(&self.endpoint.0.to_be_bytes());
        write!(f, "dlv_{}", BASE32HEX_NOPAD.encode(&bytes).to_ascii_lowercase())
    }
}

/// The text is not a delivery id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a delivery id")]
pub struct NotADeliveryId;

impl FromStr for DeliveryId {
    type Err = NotADeliveryId;

    fn from_str(text: &str) -> Result<Self, NotADeliveryId> {
        let digits = text.strip_prefix("dlv_").ok_or(NotADeliveryId)?;
        if digits.len() != 32 || digits.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(NotADeliveryId);
        }
        let bytes = BASE32HEX_NOPAD
            .decode(digits.to_ascii_uppercase().as_bytes())
            .map_err(|_| NotADeliveryId)?;
        let (event, endpoint) = bytes.split_at(16);
        Ok(Self {
            event: EventId(Uuid::from_slice(event).map_err(|_| NotADeliveryId)?),
            endpoint: EndpointId(i32::from_be_bytes(
                endpoint.try_into().map_err(|_| NotADeliveryId)?,
            )),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_delivery_id_reads_back(event: u128, endpoint: i32) {
            let id = DeliveryId { event: EventId(Uuid::from_u128(event)), endpoint: EndpointId(endpoint) };
            prop_assert_eq!(id.to_string().parse(), Ok(id));
        }

        #[test]
        fn any_text_is_read_without_a_panic(text: String) {
            let _ = text.parse::<DeliveryId>();
            let _ = EventId::from_generated(&text);
        }
    }

    #[test]
    fn a_generated_event_id_reads_back() {
        let id = EventId(Uuid::from_u128(0x01a1e1a7_4c00_7000_8000_000000000001));
        assert_eq!(id.generated(), "evt_01a1e1a74c0070008000000000000001");
        assert_eq!(EventId::from_generated(&id.generated()), Some(id));
        assert_eq!(id.unix_ms(), 1_794_787_200_000);
    }
}
