//! Which dispatcher owns which shard: `lease` says whether this process may send, `decision` what should change hands,
//! and `shards` asks the database and carries it out.

pub(crate) mod applied;
pub(crate) mod decision;
pub mod lease;
pub(crate) mod shards;
