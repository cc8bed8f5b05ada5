select x.event_id, x.endpoint_id,
   ($6::int[] is null or x.type_id = any($6)) and ($7::int is null or x.tenant_id = $7)
   and ($8::int is null or x.endpoint_id = $8)
   and ($9::text is null or x.final::text = $9 or (x.final is null and $9 <> 'delivered'))
   and not exists (select from postrider.attempts b where b.event_id = x.event_id
       and b.endpoint_id = x.endpoint_id and b.number > x.number) as may_match
from (
   select distinct on (event_id, endpoint_id) event_id, endpoint_id, number, tenant_id, type_id, final
   from postrider.attempts
   where status = $1 and (status < 200 or status > 299)
     and event_id between $2 and $3 and (event_id < $3 or endpoint_id < $4)
   order by event_id desc, endpoint_id desc, number desc limit $5
) x
order by x.event_id desc, x.endpoint_id desc
