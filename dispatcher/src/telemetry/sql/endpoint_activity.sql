insert into postrider.endpoint_activity
   (endpoint_id, writer, in_flight, concurrency, waiting, more_waiting, oldest_at, circuit_open)
select r.endpoint_id, $1, r.in_flight, r.concurrency, r.waiting, r.more_waiting, r.oldest_at, r.circuit_open
from unnest($2::int[], $3::int[], $4::int[], $5::int[], $6::bool[], $7::timestamptz[], $8::bool[])
    as r (endpoint_id, in_flight, concurrency, waiting, more_waiting, oldest_at, circuit_open)
on conflict (endpoint_id) do update
set writer = excluded.writer, in_flight = excluded.in_flight, concurrency = excluded.concurrency,
    waiting = excluded.waiting, more_waiting = excluded.more_waiting, oldest_at = excluded.oldest_at,
    circuit_open = excluded.circuit_open
