-- Statistics for charts and overviews, so that none of them counts attempts.

-- Each dispatcher writes its own rows and always the full count so far, so that repeating a statement is harmless. Readers
-- add up the writers. Endpoint 0 is the sum of all endpoints.
create table postrider.minute_statistics (
    endpoint_id int not null,
    minute      timestamptz not null,
    writer      uuid not null,              -- the dispatcher
    delivered   int not null,
    retried     int not null,               -- attempts after which the delivery is retried
    dead        int not null,
    any_failed  boolean not null,
    classes     int[] not null,             -- attempts by dispatcher::statistics::Class
    durations   int[] not null,             -- attempts by dispatcher::statistics::BOUNDS_MS
    primary key (endpoint_id, minute, writer)
) with (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.05);
-- Failing endpoints are few. The column becomes true once, so that later updates of the row stay within its page.
create index minute_statistics_failed on postrider.minute_statistics (minute) where any_failed and endpoint_id <> 0;
create index minute_statistics_minute on postrider.minute_statistics using brin (minute) with (pages_per_range = 16);

create table postrider.hour_statistics (
    endpoint_id int not null,
    hour        timestamptz not null,
    delivered   int not null,
    retried     int not null,
    dead        int not null,
    classes     int[] not null,
    durations   int[] not null,
    primary key (endpoint_id, hour)
);
create index hour_statistics_hour on postrider.hour_statistics using brin (hour) with (pages_per_range = 16);

-- Current activity of each endpoint that has any. A row counts only while its writer's lease is valid.
create table postrider.endpoint_activity (
    endpoint_id  int primary key,
    writer       uuid not null,
    in_flight    int not null,
    concurrency  int not null,              -- attempts it may have in flight now
    waiting      int not null,              -- deliveries in memory that are due
    more_waiting boolean not null,          -- there are more on disk
    oldest_at    timestamptz,               -- when the oldest of them was emitted
    circuit_open boolean not null
) with (fillfactor = 50);
create index endpoint_activity_writer on postrider.endpoint_activity (writer);
