select (select count(*) from (
            select from unnest($1::int[]) as e (id)
            cross join lateral (select from postrider.queue q where q.endpoint_id = e.id limit $2) q limit $2) n)
     + (select count(*) from (
            select from unnest($1::int[]) as e (id)
            cross join lateral (select from postrider.retries r where r.endpoint_id = e.id limit $2) r limit $2) n)
