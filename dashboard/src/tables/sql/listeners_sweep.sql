with old as (
   select endpoint_id from postrider.listeners where expires_at < clock_timestamp()
   order by expires_at limit $1 for update skip locked
), ended as (
   delete from postrider.listeners l using old where l.endpoint_id = old.endpoint_id returning l.endpoint_id
)
update postrider.endpoints e set state = 'deleted', updated_at = clock_timestamp()
from ended where e.id = ended.endpoint_id
