-- Nothing can be added any more. What is left in the outbox for the source waits for the target.
with stopped as (
    update postrider.tenant_moves set state = 'copying' where id = $1 and state = 'stopping'
    returning tenant_id, source
)
update postrider.cell_outbox o set cell_id = null from stopped s where o.tenant_id = s.tenant_id and o.cell_id = s.source
