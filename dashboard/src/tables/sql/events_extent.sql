-- How many tenants there are, up to $1, and an id that no event is below: the bound of the oldest partition.
select (select count(*) from (select from postrider.tenants where deleted_at is null limit $1) t),
   least(
      (select id from postrider.archived_events order by id limit 1),
      (select substring(pg_get_expr(c.relpartbound, c.oid) from '\(''([0-9a-f-]{36})''\)')::uuid as lower
       from pg_inherits i join pg_class c on c.oid = i.inhrelid
       where i.inhparent = 'postrider.events'::regclass order by lower limit 1))
