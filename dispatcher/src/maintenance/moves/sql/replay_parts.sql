-- The parts of the next replays of a tenant after $2. $3 is a limit for parts, of which a replay has a few for each endpoint.
with replay as materialized (
    select r.id from postrider.replays r where r.tenant_id = $1 and r.id > $2::bigint order by r.id limit greatest($3 / 200, 1)
)
select coalesce((select json_agg(t) from postrider.replay_parts t where t.replay_id in (select id from replay)), '[]')::text as rows,
       (select max(r.id)::text from replay r) as last, (select count(*) from postrider.replay_parts t where t.replay_id in (select id from replay)) as count
