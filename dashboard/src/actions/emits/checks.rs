//! Schema validation before an emit waits for anything, so that validation holds no connection and delays no other
//! event.
//! Invariant: a validation that takes longer than a moment runs off the async workers, one at a time per tenant. If
//! the client disconnects, it runs to its end, which is bounded, and counts until then.

use std::{sync::Arc, time::Duration};

use postrider_sender::{Effort, EmitError, Emitter, Published, Verdict};
use tokio::task::spawn_blocking;

use super::{OwnedEvent, rules::refusal};
use crate::{
    Pool,
    http::{
        problem::Problem,
        shares::{Bounds, Shares},
    },
};

const LONG_CHECKS: Bounds = Bounds {
    each: 1,
    all: 2,
    waiting: 64,
    wait: Duration::from_secs(5),
};

pub(crate) struct Checks {
    emitter: Emitter,
    pool: Pool,
    long: Arc<Shares>,
}

impl Checks {
    pub(super) fn new(emitter: Emitter, pool: Pool) -> Self {
        Self {
            emitter,
            pool,
            long: Shares::new(LONG_CHECKS),
        }
    }

    /// Returns the event with the schema it was validated against. If there is no schema, the emit reports it.
    pub(crate) async fn check(&self, event: OwnedEvent) -> Result<OwnedEvent, Problem> {
        let Some(schema) = self.schema_of(&event).await? else {
            return Ok(event);
        };
        let (schema, event, verdict) = match schema.check(&event.data, Effort::Quick) {
            Verdict::Undecided => self.check_long(schema, event).await?,
            verdict => (schema, event, verdict),
        };
        match verdict {
            Verdict::Fits => Ok(OwnedEvent {
                checked: Some(schema.id()),
                ..event
            }),
            Verdict::Broken(violations) => Err(refusal(EmitError::Schema(violations), "")),
            Verdict::Undecided => Ok(event),
        }
    }

    async fn check_long(
        &self,
        schema: Arc<Published>,
        event: OwnedEvent,
    ) -> Result<(Arc<Published>, OwnedEvent, Verdict), Problem> {
        let share = self.long.take(&event.tenant).await?;
        let checking = spawn_blocking(move || {
            let verdict = schema.check(&event.data, Effort::Full);
            drop(share);
            (schema, event, verdict)
        });
        checking
            .await
            .map_err(|error| Problem::internal("schema validation failed", error))
    }

    async fn schema_of(&self, event: &OwnedEvent) -> Result<Option<Arc<Published>>, Problem> {
        let (name, version) = (&event.type_name, event.version.as_deref());
        if let Some(known) = self.emitter.known_schema(name, version) {
            return Ok(Some(known));
        }
        let mut connection = self.pool.acquire().await?;
        Ok(self.emitter.find_schema(&mut connection, name, version).await?)
    }
}
