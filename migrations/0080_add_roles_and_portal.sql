-- What people may do in the dashboard, and the sessions of customers, who come by a link instead of a password.

create type postrider.person_role as enum ('admin', 'operator', 'read-only');
-- Everybody who is there already could do everything; whoever comes later is given a role.
alter table postrider.people add column role postrider.person_role not null default 'admin';
alter table postrider.people alter column role set default 'read-only';

-- A session is of a person, or of whoever came by a tenant's link.
alter table postrider.sessions alter column person_id drop not null;
alter table postrider.sessions add column tenant_id int references postrider.tenants;
alter table postrider.sessions add constraint sessions_owner check (num_nonnulls(person_id, tenant_id) = 1);
create index sessions_person on postrider.sessions (person_id);
create index sessions_tenant on postrider.sessions (tenant_id);

-- A link is its row: whoever takes the row away has used it.
create table postrider.portal_links (
    token_hash bytea primary key,
    tenant_id  int not null references postrider.tenants,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null
);
create index audit_actor on postrider.audit (actor, id);
create index portal_links_expires on postrider.portal_links (expires_at);
