-- The tenant goes on where it was.
with cancelled as (
    update postrider.tenant_moves set state = 'cancelled', ended_at = clock_timestamp(), waits_for = null
    where id = $1 and state = 'cancelling'
    returning tenant_id
)
update postrider.tenants t set moving = false from cancelled c where t.id = c.tenant_id
