-- Removing what is stored of a tenant that was deleted: a job, and how far it is.
create table postrider.erasures (
    id         bigint generated always as identity primary key,
    public_id  text not null unique,
    tenant_id  int not null,
    slug       text not null,
    total      bigint not null,               -- events, as they were counted when it was asked for
    done       bigint not null default 0,
    -- Producers whose transactions began before this one may still commit an event.
    xid        xid8 not null default pg_current_xact_id(),
    asked_by   text not null,
    created_at timestamptz not null default clock_timestamp(),
    ended_at   timestamptz
);
