-- A dispatcher that takes shards over looks for work at each of their endpoints. Deleted endpoints stay as rows for good and
-- must cost nothing there; of those deleted last, rows of late producers may still wait to be dropped.
create index endpoints_live on postrider.endpoints (id) where state <> 'deleted';
create index endpoints_deleted on postrider.endpoints (updated_at) where state = 'deleted';
