with wanted as materialized (
    select s.shard, s.epoch, s.owner from postrider.shards s
    where (s.shard, s.epoch) in (select * from unnest($2::smallint[], $3::bigint[]))
),
dead as materialized (
    select d.id from postrider.dispatchers d
    where d.id in (select w.owner from wanted w) and d.expires_at <= clock_timestamp()
    order by d.id for update skip locked
),
free as (
    select s.shard from postrider.shards s
    where (s.shard, s.epoch) in (select w.shard, w.epoch from wanted w)
      and (s.owner is null or s.owner in (select d.id from dead d)
           or not exists (select from postrider.dispatchers d where d.id = s.owner))
    order by s.shard for update skip locked
)
update postrider.shards s set owner = $1, epoch = s.epoch + 1
from free where s.shard = free.shard
returning s.shard, s.epoch
