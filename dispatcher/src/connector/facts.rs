//! What a server says about itself, and whether that is what was asked for.

use sqlx::{PgConnection, Row};

use super::url::Wanted;

const FACTS: &str = "select pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('transaction_read_only') = 'on',
        case when not pg_catalog.pg_is_in_recovery()
             then ('x' || substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8))::bit(32)::int end";

/// What a server says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) in_recovery: bool,
    pub(super) read_only: bool,
    /// None in recovery.
    pub(super) timeline: Option<i32>,
}

impl Facts {
    pub(super) async fn of(connection: &mut PgConnection) -> Result<Self, sqlx::Error> {
        let row = sqlx::raw_sql(FACTS).fetch_one(connection).await?;
        Ok(Self {
            in_recovery: row.try_get(0)?,
            read_only: row.try_get(1)?,
            timeline: row.try_get(2)?,
        })
    }

    pub(super) fn fits(self, wanted: Wanted) -> bool {
        match wanted {
            Wanted::Any | Wanted::PreferStandby => true,
            Wanted::ReadWrite => !self.in_recovery && !self.read_only,
            Wanted::ReadOnly => self.in_recovery || self.read_only,
            Wanted::Primary => !self.in_recovery,
            Wanted::Standby => self.in_recovery,
        }
    }

    /// Whether another host would be better.
    pub(super) fn is_second_best(self, wanted: Wanted) -> bool {
        wanted == Wanted::PreferStandby && !self.in_recovery
    }

    pub(super) fn words(self) -> &'static str {
        match (self.in_recovery, self.read_only) {
            (true, _) => "a standby",
            (false, true) => "a primary that is read-only",
            (false, false) => "a primary",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIMARY: Facts = Facts {
        in_recovery: false,
        read_only: false,
        timeline: Some(2),
    };

    const STANDBY: Facts = Facts {
        in_recovery: true,
        read_only: true,
        timeline: None,
    };

    #[test]
    fn each_attribute_has_its_servers() {
        let read_only = Facts {
            read_only: true,
            ..PRIMARY
        };
        for (wanted, expected) in [
            (Wanted::Any, [true, true, true]),
            (Wanted::ReadWrite, [true, false, false]),
            (Wanted::ReadOnly, [false, true, true]),
            (Wanted::Primary, [true, true, false]),
            (Wanted::Standby, [false, false, true]),
            (Wanted::PreferStandby, [true, true, true]),
        ] {
            let fit = [PRIMARY, read_only, STANDBY].map(|facts| facts.fits(wanted));
            assert_eq!(fit, expected, "{wanted}");
        }
    }
}
