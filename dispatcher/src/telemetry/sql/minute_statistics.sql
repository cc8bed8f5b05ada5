insert into postrider.minute_statistics
   (endpoint_id, minute, writer, delivered, retried, dead, any_failed, classes, durations)
select r.endpoint_id, to_timestamp(r.minute * 60), r.writer, r.delivered, r.retried, r.dead, r.any_failed,
       ($8::int[])[(r.number - 1) * $10 + 1 : r.number * $10],
       ($9::int[])[(r.number - 1) * $11 + 1 : r.number * $11]
from unnest($1::uuid[], $2::int[], $3::bigint[], $4::int[], $5::int[], $6::int[], $7::bool[]) with ordinality
    as r (writer, endpoint_id, minute, delivered, retried, dead, any_failed, number)
on conflict (endpoint_id, minute, writer) do update
set delivered = excluded.delivered, retried = excluded.retried, dead = excluded.dead,
    any_failed = excluded.any_failed, classes = excluded.classes, durations = excluded.durations
