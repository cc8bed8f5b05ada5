-- Who may do what: API keys, people, sessions and portal links; the audit log; idempotent requests; master keys in use.

create type postrider.key_role as enum ('admin', 'producer', 'tenant');
create type postrider.person_role as enum ('admin', 'operator', 'read-only');

create table postrider.api_keys (
    id         int generated always as identity primary key,
    public_id  text not null unique,
    hash       bytea not null unique,     -- sha-256; the key itself is shown once and not stored
    role       postrider.key_role not null,
    tenant_id  int references postrider.tenants,
    name       text not null,
    created_at timestamptz not null default clock_timestamp(),
    revoked_at timestamptz,
    prefix     text not null,             -- the start of the key, by which people recognise it
    expires_at timestamptz,               -- null: never
    last_used_at timestamptz,             -- written at most once a minute
    check ((role = 'tenant') = (tenant_id is not null))
);

create table postrider.people (
    id            int generated always as identity primary key,
    login         text not null unique,
    password_hash text not null,
    created_at    timestamptz not null default clock_timestamp(),
    role          postrider.person_role not null default 'read-only'
);

-- A session belongs to a person, or to a tenant whose portal link was opened.
create table postrider.sessions (
    token_hash bytea primary key,
    person_id  int references postrider.people,
    csrf       bytea not null,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    tenant_id  int references postrider.tenants,
    link_hash  bytea,                     -- of the portal link that opened it
    constraint sessions_owner check (num_nonnulls(person_id, tenant_id) = 1)
);
create index sessions_person on postrider.sessions (person_id);
create index sessions_tenant on postrider.sessions (tenant_id);

-- What a form resulted in, until the page after the redirect shows it: a new key, the response to a test event. Encrypted,
-- and deleted when it is shown or after ten minutes.
create table postrider.form_results (
    public_id  text primary key,
    session    bytea not null references postrider.sessions on delete cascade,
    sealed     bytea not null,
    created_at timestamptz not null default clock_timestamp()
);
create index form_results_session on postrider.form_results (session, created_at);

-- Opening a link deletes its row, so that each works once.
create table postrider.portal_links (
    token_hash bytea primary key,
    tenant_id  int not null references postrider.tenants,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null
);
create index portal_links_expires on postrider.portal_links (expires_at);

create table postrider.audit (
    id        bigint generated always as identity primary key,
    at        timestamptz not null default clock_timestamp(),
    actor     text not null,
    action    text not null,
    tenant_id int,
    subject   text not null,
    detail    jsonb,
    address   text,                       -- of the client; null: not a request
    changes   jsonb                       -- {"setting": {"before": …, "after": …}}
);
create index audit_tenant on postrider.audit (tenant_id, id);
create index audit_actor on postrider.audit (actor, id);
create index audit_action on postrider.audit (action, id);

-- Responses to requests with an Idempotency-Key. Written in the transaction of the request, so that the row exists if and
-- only if its change does. An advisory lock on the scope is held while that transaction runs.
create table postrider.idempotency (
    scope         bytea primary key,      -- sha-256 of the API key's id, the path and the Idempotency-Key
    fingerprint   bytea not null,         -- sha-256 of the body
    status        smallint not null,
    response      bytea not null,         -- encrypted: some responses contain a secret
    created_at    timestamptz not null default clock_timestamp(),
    tenant_id     int,                    -- deleted together with the tenant; null: belongs to no tenant
    -- The transaction and shard of a change that dispatchers must apply. The response is returned again only once the
    -- change is in effect.
    settles_xid   xid8,
    settles_shard smallint
);
create index idempotency_age on postrider.idempotency (created_at);

-- Requests with an Idempotency-Key that run without an open transaction because they wait for a receiver. A row exists
-- while its request runs and expires if the process was killed.
create table postrider.idempotency_claims (
    scope      bytea primary key,
    expires_at timestamptz not null
);

-- The master keys that running processes hold, identified by the first bytes of a hash, which every encrypted value starts
-- with: changing the master key must not lock any process out. A row is renewed while its process runs.
create table postrider.key_holders (
    id         uuid primary key,
    role       text not null,
    name       text not null,
    keys       bytea[] not null,
    heard_at   timestamptz not null,
    expires_at timestamptz not null
) with (fillfactor = 50);
