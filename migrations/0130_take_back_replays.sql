-- What a delivery was before a bulk replay put it in line. A replay that is cancelled gives it back as it was. Null of every
-- other delivery, so that an ordinary row is no larger than before.
alter table postrider.queue
    add column was_source postrider.replay_source,
    add column was_reason postrider.dead_reason,
    add column was_at     timestamptz,            -- died at, or was due at
    add column was_step   smallint,
    add column was_replay text;

-- A dead letter that comes back as it was has been told of: its death is older than the statement that puts it back.
drop trigger dead_letters_notice on postrider.dead_letters;
create trigger dead_letters_notice after insert on postrider.dead_letters
    for each row when (new.died_at >= statement_timestamp()) execute function postrider.notice_dead();
