-- Lists that are narrowed to the code of an answer read this. What was not accepted is little, and what was pays nothing
-- for it. Codes of accepted attempts need no index: nearly every row has one.
create index attempts_refused on postrider.attempts (status, event_id, endpoint_id, number)
    where status < 200 or status > 299;

-- The dead letters of all tenants, the newest first.
create index dead_letters_newest on postrider.dead_letters (event_id, endpoint_id);
