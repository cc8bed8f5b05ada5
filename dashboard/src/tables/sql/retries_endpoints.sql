with recursive w as (
   (select endpoint_id from postrider.retries order by endpoint_id limit 1)
   union all
   select (select r.endpoint_id from postrider.retries r where r.endpoint_id > w.endpoint_id
           order by r.endpoint_id limit 1)
   from w where w.endpoint_id is not null
)
select p.id from (select endpoint_id from w where endpoint_id is not null limit $1) w
join postrider.endpoints p on p.id = w.endpoint_id and p.state <> 'deleted'
