-- An endpoint is failing for long only if it failed on several days without a long pause between them. Days are in UTC.
alter table postrider.endpoint_health
    add column failed_days    smallint not null default 1,
    add column last_failed_on date not null default (clock_timestamp() at time zone 'UTC')::date;

-- Endpoints that an answer, or days of failure, take out of service. Written with the result that says so; a dispatcher
-- disables them soon after.
create table postrider.endpoints_to_disable (
    endpoint_id int primary key,
    cause       text not null check (cause in ('gone', 'failing')),
    noted_at    timestamptz not null default clock_timestamp()
);
