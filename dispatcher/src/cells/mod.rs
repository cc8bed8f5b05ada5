//! Cells: adding one, and what is known of each. Home is the database with the directory; the directory reaches the cells by
//! logical replication, events by the relay (`maintenance/relay/home.rs`).

pub mod add;
pub mod list;
pub mod state;

/// The cell with the directory.
pub const HOME: i16 = 0;
/// Ids are divided between so many cells.
pub const CELLS_MAX: i16 = 64;
/// Of a cell's copy of the directory, in the cell's database.
pub(crate) const SUBSCRIPTION: &str = "postrider_home";

/// The replication slot of a cell, unique on the home database's server.
pub(crate) const SLOT: &str = "select format('postrider_%s_cell_%s', d.oid, $1::smallint) from pg_database d
     where d.datname = current_database()";
