//! Which dispatcher owns which shard: `lease` tells whether this process may send, `decision` what should change, and
//! `shards` queries the database and carries it out.

pub(crate) mod applied;
pub(crate) mod decision;
pub mod lease;
pub mod owners;
pub(crate) mod shards;
