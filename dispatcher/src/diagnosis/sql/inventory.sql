-- Everything in our schema, one line each, but for the partitions, which come and go. Also what `migrations/inventory.txt` is
-- made with. An index that is not valid is left out: nothing uses it. The names in definitions depend on the search path.
with own as (
    select c.oid, c.relname from pg_class c
    where c.relnamespace = 'postrider'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
      and c.relname !~ '^(events|attempts)_[0-9]'
)
select line from (
    select format('table %s', t.relname) as line from own t
    union all
    select format('column %s.%s %s%s%s%s', t.relname, a.attname, format_type(a.atttypid, a.atttypmod),
                  case when a.attnotnull then ' not null' else '' end, case when a.attidentity <> '' then ' identity' else '' end,
                  case when a.attgenerated <> '' then ' generated ' else ' default ' end || pg_get_expr(d.adbin, d.adrelid))
    from own t join pg_attribute a on a.attrelid = t.oid
    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where a.attnum > 0 and not a.attisdropped
    union all
    select format('index %s: %s', i.relname, pg_get_indexdef(i.oid))
    from own t join pg_index x on x.indrelid = t.oid join pg_class i on i.oid = x.indexrelid where x.indisvalid
    union all
    select format('constraint %s on %s', o.conname, t.relname)
    from own t join pg_constraint o on o.conrelid = t.oid where o.contype in ('c', 'f', 'p', 'u') and o.convalidated
    union all
    select format('trigger %s on %s: %s%s', g.tgname, t.relname, pg_get_triggerdef(g.oid),
                  case g.tgenabled when 'O' then '' when 'D' then ', disabled' when 'R' then ', enabled for replicas only'
                                   else ', enabled always' end)
    from own t join pg_trigger g on g.tgrelid = t.oid where not g.tgisinternal
    union all
    select format('function %s(%s)', p.proname, pg_get_function_identity_arguments(p.oid))
    from pg_proc p where p.pronamespace = 'postrider'::regnamespace
    union all
    select format('type %s: %s', y.typname, string_agg(e.enumlabel, ', ' order by e.enumsortorder))
    from pg_type y join pg_enum e on e.enumtypid = y.oid where y.typnamespace = 'postrider'::regnamespace group by y.typname
) every
order by line collate "C"
