//! Why a due delivery is not sent: its endpoint, its tenant or the whole installation has to be resumed first.

use postrider_proto::{EndpointState, TenantId};
use sqlx::{FromRow, PgExecutor};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    EndpointPaused,
    EndpointDisabled,
    TenantPaused,
    /// All sending is stopped, or the database is a restored copy.
    SendingStopped,
}

impl Hold {
    /// What has to happen before anything is sent, as a clause. Customers learn nothing about the installation.
    pub(crate) const fn until(self) -> &'static str {
        match self {
            Self::EndpointPaused => "the endpoint is resumed",
            Self::EndpointDisabled => "the endpoint is enabled",
            Self::TenantPaused | Self::SendingStopped => "sending is resumed",
        }
    }

    /// The word for an endpoint that nobody paused or disabled itself.
    pub(crate) const fn badge(self, is_team: bool) -> Option<&'static str> {
        match (self, is_team) {
            (Self::EndpointPaused | Self::EndpointDisabled, _) => None,
            (Self::TenantPaused, true) => Some("tenant paused"),
            (Self::SendingStopped, true) => Some("sending stopped"),
            (Self::TenantPaused | Self::SendingStopped, false) => Some("sending paused"),
        }
    }
}

/// The switches that an endpoint depends on.
#[derive(Debug, Clone, Copy, FromRow)]
pub(crate) struct Switches {
    pub(crate) endpoint_state: EndpointState,
    pub(crate) tenant_paused: bool,
    pub(crate) sending_stopped: bool,
}

impl Switches {
    pub(crate) fn hold(&self) -> Option<Hold> {
        match self.endpoint_state {
            EndpointState::Paused => Some(Hold::EndpointPaused),
            EndpointState::Disabled => Some(Hold::EndpointDisabled),
            EndpointState::Deleted => None,
            EndpointState::Active if self.sending_stopped => Some(Hold::SendingStopped),
            EndpointState::Active => self.tenant_paused.then_some(Hold::TenantPaused),
        }
    }
}

/// A tenant with its switch and that of the installation.
#[derive(Debug, FromRow)]
pub(crate) struct TenantRow {
    pub(crate) slug: String,
    pub(crate) tenant_paused: bool,
    pub(crate) sending_stopped: bool,
}

/// Deleted tenants too.
pub(crate) async fn of_tenant(db: impl PgExecutor<'_>, id: TenantId) -> sqlx::Result<Option<TenantRow>> {
    sqlx::query_as(
        "select slug, paused_at is not null as tenant_paused,
                coalesce((select stopped from postrider.sending_state()), true) as sending_stopped
         from postrider.tenants where id = $1",
    )
    .bind(id)
    .fetch_optional(db)
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_to_be_resumed_first_is_the_nearest_switch() {
        let hold = |endpoint_state, tenant_paused, sending_stopped| {
            let switches = Switches {
                endpoint_state,
                tenant_paused,
                sending_stopped,
            };
            switches.hold()
        };
        assert_eq!(hold(EndpointState::Active, false, false), None);
        assert_eq!(hold(EndpointState::Active, true, false), Some(Hold::TenantPaused));
        assert_eq!(
            hold(EndpointState::Active, true, true),
            Some(Hold::SendingStopped)
        );
        assert_eq!(
            hold(EndpointState::Paused, true, true),
            Some(Hold::EndpointPaused)
        );
        assert_eq!(
            hold(EndpointState::Disabled, false, false),
            Some(Hold::EndpointDisabled)
        );
    }
}
