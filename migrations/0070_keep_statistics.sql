-- What the pages' figures and charts are made of, so that none of them counts attempts.
-- Each dispatcher writes rows of its own and always the whole count so far, so that a statement done twice does no harm;
-- readers add the writers up. Endpoint 0 is all of them together.
create table postrider.minute_statistics (
    endpoint_id int not null,
    minute      timestamptz not null,
    writer      uuid not null,              -- the dispatcher
    delivered   int not null,
    retried     int not null,               -- attempts after which the delivery waits for another
    dead        int not null,
    any_failed  boolean not null,
    classes     int[] not null,             -- attempts by dispatcher::statistics::Class
    durations   int[] not null,             -- attempts by dispatcher::statistics::BOUNDS_MS
    primary key (endpoint_id, minute, writer)
) with (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.05);
-- Those that fail, of all endpoints: few. The column turns true once, so that counting on stays within the page.
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

-- What dispatchers have in hand right now, a row for each endpoint that has something going on. A row counts only while
-- its writer's lease does.
create table postrider.endpoint_activity (
    endpoint_id  int primary key,
    writer       uuid not null,
    in_flight    int not null,
    places       int not null,              -- attempts it may have on the wire now
    waiting      int not null,              -- deliveries that could go now and are in memory
    more_waiting boolean not null,          -- there are others on disk
    oldest_at    timestamptz,               -- when the oldest of them was emitted
    circuit_open boolean not null
) with (fillfactor = 50);
create index endpoint_activity_writer on postrider.endpoint_activity (writer);
