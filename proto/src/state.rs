//! The states the outside sees, in the words it sees them in. The same words are Postgres enums.

use serde::{Deserialize, Serialize};

macro_rules! words {
    ($(#[$doc:meta])* $name:ident($pg:literal) { $($variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "sqlx", derive(sqlx::Type), sqlx(type_name = $pg))]
        pub enum $name {
            $(#[serde(rename = $word)] #[cfg_attr(feature = "sqlx", sqlx(rename = $word))] $variant),+
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
    };
}

words!(
    /// How a delivery ended.
    FinalState("postrider.final_state") { Delivered = "delivered", Dead = "dead" }
);
words!(
    /// Why a delivery is dead.
    DeadReason("postrider.dead_reason") {
        Exhausted = "exhausted",
        Gone = "gone",
        EndpointDisabled = "endpoint_disabled",
        TooOld = "too_old",
        RefusedAddress = "refused_address",
    }
);
words!(
    /// `Paused` keeps queueing and sends nothing; `Disabled` gets no new deliveries.
    EndpointState("postrider.endpoint_state") {
        Active = "active",
        Paused = "paused",
        Disabled = "disabled",
        Deleted = "deleted",
    }
);
words!(
    /// The header form that an endpoint's signatures take.
    SignatureFormat("postrider.signature_format") { TV1 = "t-v1", Standard = "standard" }
);
words!(
    /// What an API key may do.
    KeyRole("postrider.key_role") { Admin = "admin", Producer = "producer", Tenant = "tenant" }
);

/// Where a delivery is, as the outside sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryState {
    Pending,
    Delivered,
    Dead,
}

impl DeliveryState {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Delivered => "delivered",
            Self::Dead => "dead",
        }
    }
}

impl From<Option<FinalState>> for DeliveryState {
    fn from(end: Option<FinalState>) -> Self {
        match end {
            None => Self::Pending,
            Some(FinalState::Delivered) => Self::Delivered,
            Some(FinalState::Dead) => Self::Dead,
        }
    }
}
