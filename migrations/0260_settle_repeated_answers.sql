-- A stored answer of a change that dispatchers must apply: which transaction made it, and for which shard. The answer is
-- given again only when the change is in effect.
alter table postrider.idempotency add column settles_xid xid8, add column settles_shard smallint;
