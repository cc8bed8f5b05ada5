//! Public states and their names. The same names are Postgres enums.

use serde::{Deserialize, Serialize};

macro_rules! words {
    ($(#[$doc:meta])* $name:ident($pg:literal) { $($variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $(#[serde(rename = $word)] $variant),+
        }

        impl $name {
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        // The binary form of an enum is its name. It is sent as text, which the statement casts
        // (`$1::postrider.final_state`), so that no type has to be looked up on each connection.
        #[cfg(feature = "sqlx")]
        impl sqlx::Type<sqlx::Postgres> for $name {
            fn type_info() -> sqlx::postgres::PgTypeInfo {
                <str as sqlx::Type<sqlx::Postgres>>::type_info()
            }

            fn compatible(ty: &sqlx::postgres::PgTypeInfo) -> bool {
                use sqlx::TypeInfo;
                // Postgres includes the schema only if it is not in the role's search path.
                let name = ty.name().strip_prefix("postrider.").unwrap_or(ty.name());
                name == $pg || <str as sqlx::Type<sqlx::Postgres>>::compatible(ty)
            }
        }

        #[cfg(feature = "sqlx")]
        impl<'r> sqlx::Decode<'r, sqlx::Postgres> for $name {
            fn decode(value: sqlx::postgres::PgValueRef<'r>) -> Result<Self, sqlx::error::BoxDynError> {
                let word = <&str as sqlx::Decode<sqlx::Postgres>>::decode(value)?;
                Self::ALL
                    .iter()
                    .copied()
                    .find(|one| one.as_str() == word)
                    .ok_or_else(|| format!("`{word}` is not a {}", $pg).into())
            }
        }

        #[cfg(feature = "sqlx")]
        impl sqlx::Encode<'_, sqlx::Postgres> for $name {
            fn encode_by_ref(
                &self,
                buf: &mut sqlx::postgres::PgArgumentBuffer,
            ) -> Result<sqlx::encode::IsNull, sqlx::error::BoxDynError> {
                <&str as sqlx::Encode<sqlx::Postgres>>::encode_by_ref(&self.as_str(), buf)
            }
        }

        #[cfg(feature = "sqlx")]
        impl sqlx::postgres::PgHasArrayType for $name {
            fn array_type_info() -> sqlx::postgres::PgTypeInfo {
                <&str as sqlx::postgres::PgHasArrayType>::array_type_info()
            }
        }
    };
}

words!(
    /// How a delivery ended.
    FinalState("final_state") { Delivered = "delivered", Dead = "dead", Discarded = "discarded" }
);
words!(
    /// Why a delivery is dead.
    DeadReason("dead_reason") {
        Exhausted = "exhausted",
        Gone = "gone",
        EndpointDisabled = "endpoint_disabled",
        TooOld = "too_old",
        RefusedAddress = "refused_address",
    }
);
words!(
    /// `Paused` keeps queueing and sends nothing; `Disabled` gets no new deliveries.
    EndpointState("endpoint_state") {
        Active = "active",
        Paused = "paused",
        Disabled = "disabled",
        Deleted = "deleted",
    }
);
words!(
    /// Whether an endpoint gets what is sent to it. `Failing`: attempts have failed since the last success.
    HealthStatus("health_status") {
        Healthy = "healthy",
        Failing = "failing",
        Paused = "paused",
        Disabled = "disabled",
    }
);
words!(
    /// `Open`: after ten consecutive failures one attempt at a time is let through until one succeeds.
    CircuitState("circuit_state") { Closed = "closed", Open = "open" }
);
words!(
    /// The format of an endpoint's signatures.
    SignatureFormat("signature_format") {
        TV1 = "t-v1",
        Standard = "standard",
        StandardEd25519 = "standard-ed25519",
    }
);
words!(
    /// What a bulk replay sends: deliveries again, or events that an endpoint missed.
    ReplayKind("replay_kind") { Deliveries = "deliveries", Missing = "missing" }
);
words!(
    /// The progress of a bulk replay.
    ReplayState("replay_state") { Running = "running", Done = "done", Cancelled = "cancelled" }
);
words!(
    /// Where a part of a bulk replay takes its deliveries from. `Retrying` ones have failed and wait for their next attempt.
    ReplaySource("replay_source") {
        Dead = "dead",
        Delivered = "delivered",
        Retrying = "retrying",
        Missing = "missing",
    }
);
words!(
    /// What an API key may do.
    KeyRole("key_role") { Admin = "admin", Producer = "producer", Tenant = "tenant" }
);
words!(
    /// What a team member may do.
    PersonRole("person_role") { Admin = "admin", Operator = "operator", ReadOnly = "read-only" }
);

/// The public state of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryState {
    Pending,
    Delivered,
    Dead,
    /// It was dead, and someone decided that it need not be delivered.
    Discarded,
}

impl DeliveryState {
    pub const ALL: [Self; 4] = [Self::Pending, Self::Delivered, Self::Dead, Self::Discarded];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Delivered => "delivered",
            Self::Dead => "dead",
            Self::Discarded => "discarded",
        }
    }
}

impl From<Option<FinalState>> for DeliveryState {
    fn from(end: Option<FinalState>) -> Self {
        match end {
            None => Self::Pending,
            Some(FinalState::Delivered) => Self::Delivered,
            Some(FinalState::Dead) => Self::Dead,
            Some(FinalState::Discarded) => Self::Discarded,
        }
    }
}
