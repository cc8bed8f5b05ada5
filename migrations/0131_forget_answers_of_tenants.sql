-- Whose request an answer was given to, so that it goes with the tenant. Null where it was nobody's.
alter table postrider.idempotency add column tenant_id int;
