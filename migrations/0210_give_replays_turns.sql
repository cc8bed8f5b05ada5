-- Replays take turns: each step is due at a time, whichever process takes it. One that can't move waits longer each time.
alter table postrider.replays
    add column step_at       timestamptz not null default clock_timestamp(),
    add column idle_ms       int not null default 0,        -- the wait before the step that is due
    add column measured_at   timestamptz,
    add column measured_done bigint;
create index replays_due on postrider.replays (step_at) where state = 'running';
create index replays_running on postrider.replays (tenant_id) where state = 'running';
-- When deliveries of it were last queued, for the pace.
alter table postrider.replay_parts add column stepped_at timestamptz;
