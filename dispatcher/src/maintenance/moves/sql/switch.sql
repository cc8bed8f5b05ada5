-- From here on the tenant lives at the target, and accepts events there. At home those that waited come first: the tenant is moving
-- until they are emitted. A move that was cancelled, or has switched before, changes nothing.
with switched as (
    update postrider.tenant_moves
    set state = case when target = 0 then 'switching' else 'erasing' end::postrider.move_state,
        switched_at = case when target <> 0 then clock_timestamp() end
    where id = $1 and state = 'copying'
    returning tenant_id, target
)
update postrider.tenants t set cell_id = s.target, moving = s.target = 0 from switched s where t.id = s.tenant_id
