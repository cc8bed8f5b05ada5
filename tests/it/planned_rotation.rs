//! Secrets that rotate by themselves: announced days before, replaced once, with an overlap, and shown.

use chrono::{DateTime, TimeDelta, Utc};
use postrider_dispatcher::{
    planned_rotation::{self, Done},
    vault::Vault,
};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgPool};

use crate::support::{Answer, Api, Database, MASTER_KEY, Postrider, Receiver};

async fn change(database: &Database, statement: &str) {
    sqlx::raw_sql(AssertSqlSafe(statement))
        .execute(&mut database.connect().await)
        .await
        .expect("changed");
}

/// As the duty does it, without the hour's wait.
async fn run(pool: &PgPool) -> Done {
    let vault = Vault::parse(MASTER_KEY).expect("a key");
    planned_rotation::run(pool, &vault).await.expect("done")
}

async fn rotations(api: &Api) -> Vec<Value> {
    let list = api.get("/tenants/acme/rotations").await;
    list["data"].as_array().expect("a list").clone()
}

fn time(value: &Value) -> DateTime<Utc> {
    let text = value.as_str().unwrap_or_else(|| panic!("{value} is no time"));
    text.parse().expect("a time")
}

async fn policy(api: &Api, days: Value) {
    let (status, answer) = api
        .call(
            Method::PUT,
            "/tenants/acme",
            Some(json!({ "rotate_every_days": days })),
        )
        .await;
    assert!(status.is_success(), "{answer}");
    assert_eq!(answer["rotate_every_days"], days);
}

#[tokio::test]
async fn a_secret_is_announced_by_the_hourly_duty_then_replaced_once_and_refusals_are_shown() {
    let database = Database::fresh().await;
    let dashboard = Postrider::on_database("dashboard", &database).start().await;
    let receiver = Receiver::start().await;
    let api = dashboard.api();
    let more = json!({ "types": ["*", "postrider.secret.rotating"], "retry_schedule": ["0s"] });
    let endpoint = api.acme(&receiver.url("/hook"), more).await;
    policy(&api, json!(30)).await;
    change(
        &database,
        "update postrider.secrets set created_at = clock_timestamp() - interval '28 days'",
    )
    .await;

    // The dispatcher does this hour's duties as it starts, if nobody has.
    let _dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    let told: Value = serde_json::from_slice(&receiver.wait_for(1).await[0].body).expect("JSON");
    assert_eq!(told["type"], "postrider.secret.rotating");
    assert_eq!(told["data"]["endpoint"], json!(endpoint.id));
    let ahead = time(&told["data"]["rotates_at"]) - Utc::now();
    assert!(
        ahead > TimeDelta::days(2) && ahead <= TimeDelta::days(3),
        "{ahead}"
    );
    let shown = rotations(&api).await.remove(0);
    assert_eq!(shown["rotate_every_days"], 30);
    assert!(time(&shown["announced_at"]) <= Utc::now(), "{shown}");
    let pool = PgPool::connect_with(database.options()).await.expect("connected");
    assert_eq!(
        run(&pool).await,
        Done::default(),
        "announced once, and not due yet"
    );

    change(
        &database,
        "update postrider.planned_rotations set rotates_at = clock_timestamp()",
    )
    .await;
    let both = tokio::join!(run(&pool), run(&pool));
    assert_eq!(both.0.rotated + both.1.rotated, 1, "{both:?}");
    let path = format!("/tenants/acme/endpoints/{}/secret", endpoint.id);
    let secrets = api.get(&path).await["data"].clone();
    assert_eq!(secrets.as_array().map(Vec::len), Some(2));
    let new = secrets[0]["secret"].as_str().expect("a secret");
    let overlap = time(&secrets[1]["retires_at"]) - Utc::now();
    assert!(
        overlap > TimeDelta::hours(71) && overlap <= TimeDelta::days(3),
        "{overlap}"
    );

    receiver.answer(Answer::Status(401));
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let request = receiver.wait_for(2).await.remove(1);
    assert_eq!(request.verify(new), Ok(()));
    assert_eq!(request.verify(&endpoint.secret), Ok(()));
    api.wait_for_state("acme", "dead", 1).await;
    let shown = rotations(&api).await.remove(0);
    assert_eq!(shown["rejections_since_rotation"], 1, "{shown}");
    assert!(
        time(&shown["last_rejection_at"]) >= time(&shown["rotated_at"]),
        "{shown}"
    );
    assert_eq!(shown["announced_at"], Value::Null, "the next one is far away");

    let audit = api.get("/audit").await;
    let actions: Vec<&str> = audit["data"]
        .as_array()
        .expect("a list")
        .iter()
        .filter(|line| line["actor"] == "postrider")
        .filter_map(|line| line["action"].as_str())
        .collect();
    assert_eq!(actions, ["secret.rotated", "secret.rotation_announced"]);
}

#[tokio::test]
async fn what_was_rotated_by_hand_opted_out_or_has_three_secrets_is_left_alone() {
    let database = Database::fresh().await;
    let dashboard = Postrider::on_database("dashboard", &database).start().await;
    let api = dashboard.api();
    let url = "http://127.0.0.1:9/hook";
    let by_hand = api.acme(url, json!({})).await;
    let full = api.endpoint("acme", url, json!({})).await;
    api.endpoint("acme", url, json!({ "rotate_every_days": 0 })).await;
    api.endpoint("acme", url, json!({ "rotate_every_days": 365 }))
        .await;
    policy(&api, json!(7)).await;
    let rotate = |id: String| {
        let api = api.clone();
        async move {
            let path = format!("/tenants/acme/endpoints/{id}/secret/rotate");
            assert_eq!(api.call(Method::POST, &path, None).await.0, StatusCode::OK);
        }
    };
    for _ in 0..2 {
        rotate(full.id.clone()).await;
    }
    change(
        &database,
        "update postrider.secrets set created_at = clock_timestamp() - interval '100 days'",
    )
    .await;
    let pool = PgPool::connect_with(database.options()).await.expect("connected");
    assert_eq!(
        run(&pool).await,
        Done {
            announced: 2,
            rotated: 0
        }
    );
    rotate(by_hand.id.clone()).await;
    let make_due = "update postrider.planned_rotations set rotates_at = clock_timestamp()";
    change(&database, make_due).await;
    assert_eq!(run(&pool).await, Done::default(), "one is void, one has to wait");
    change(
        &database,
        "update postrider.secrets set retires_at = clock_timestamp() where retires_at is not null",
    )
    .await;
    assert_eq!(
        run(&pool).await,
        Done {
            announced: 0,
            rotated: 1
        }
    );

    // A policy that is taken back stops what was announced.
    change(
        &database,
        "update postrider.secrets set created_at = clock_timestamp() - interval '100 days'",
    )
    .await;
    assert_eq!(
        run(&pool).await,
        Done {
            announced: 2,
            rotated: 0
        }
    );
    policy(&api, Value::Null).await;
    change(&database, make_due).await;
    assert_eq!(run(&pool).await, Done::default());
    let path = "/tenants/acme";
    for bad in [0, 6, 731] {
        let body = json!({ "rotate_every_days": bad });
        let (status, _) = api.call(Method::PUT, path, Some(body)).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{bad}");
    }
}

#[tokio::test]
async fn a_rotation_that_fails_does_not_hold_up_the_others() {
    let database = Database::fresh().await;
    let dashboard = Postrider::on_database("dashboard", &database).start().await;
    let api = dashboard.api();
    let first = api.acme("http://127.0.0.1:9/first", json!({})).await;
    api.endpoint("acme", "http://127.0.0.1:9/second", json!({})).await;
    policy(&api, json!(30)).await;
    change(
        &database,
        "update postrider.secrets set created_at = clock_timestamp() - interval '40 days'",
    )
    .await;
    let pool = PgPool::connect_with(database.options()).await.expect("connected");
    assert_eq!(run(&pool).await.announced, 2);
    change(
        &database,
        &format!(
            "update postrider.planned_rotations set rotates_at = clock_timestamp() - interval '1 hour';
             create function postrider.planted() returns trigger language plpgsql as $$ begin
                if new.endpoint_id = (select id from postrider.endpoints where public_id = '{}') then
                    raise exception 'planted';
                end if;
                return new;
             end $$;
             create trigger planted before insert on postrider.secrets for each row execute function postrider.planted()",
            first.id
        ),
    )
    .await;
    assert_eq!(run(&pool).await.rotated, 1, "the other one's");
    change(&database, "drop trigger planted on postrider.secrets").await;
    assert_eq!(run(&pool).await.rotated, 1, "and the first one's later");
}
