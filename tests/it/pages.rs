//! The dashboard as a person without a browser sees it: sign in by the form, find the dead letter, replay it.

use reqwest::{Client, StatusCode};
use serde_json::json;

use crate::support::{ADMIN_PASSWORD, Answer, Database, Postrider, Receiver};

/// A form as it stands in a page: where it goes, and its fields with their values.
struct Form {
    action: String,
    fields: Vec<(String, String)>,
}

impl Form {
    /// The first form of a page whose action contains this.
    fn find(page: &str, action_part: &str) -> Self {
        page.split("<form")
            .skip(1)
            .map(|rest| rest.split("</form>").next().unwrap_or_default())
            .map(|form| Self {
                action: attribute(form, "action").unwrap_or_default(),
                fields: form
                    .split("<input")
                    .skip(1)
                    .filter_map(|input| {
                        let tag = input.split('>').next()?;
                        Some((
                            attribute(tag, "name")?,
                            attribute(tag, "value").unwrap_or_default(),
                        ))
                    })
                    .collect(),
            })
            .find(|form| form.action.contains(action_part))
            .unwrap_or_else(|| panic!("no form to {action_part} in {page}"))
    }

    fn fill(mut self, name: &str, value: &str) -> Self {
        let field = self.fields.iter_mut().find(|(field, _)| field == name);
        field.unwrap_or_else(|| panic!("the form has no field {name}")).1 = value.to_owned();
        self
    }

    fn encoded(&self) -> String {
        let mut text = url::form_urlencoded::Serializer::new(String::new());
        text.extend_pairs(&self.fields);
        text.finish()
    }
}

fn attribute(tag: &str, name: &str) -> Option<String> {
    let value = tag.split(&format!(" {name}=\"")).nth(1)?;
    Some(value.split('"').next()?.to_owned())
}

/// A person's browser: keeps the cookie and does not follow redirects, so that the test sees them.
struct Person<'p> {
    program: &'p Postrider,
    client: Client,
    cookies: Vec<String>,
}

impl<'p> Person<'p> {
    fn new(program: &'p Postrider) -> Self {
        let client = Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build();
        Self {
            program,
            client: client.expect("a client"),
            cookies: Vec::new(),
        }
    }

    async fn visit(&mut self, path: &str) -> (StatusCode, String) {
        let request = self.client.get(self.program.url(path));
        self.send(request).await
    }

    async fn submit(&mut self, form: &Form) -> (StatusCode, String) {
        let request = self
            .client
            .post(self.program.url(&form.action))
            .header("content-type", "application/x-www-form-urlencoded")
            .header("origin", self.program.url(""))
            .body(form.encoded());
        self.send(request).await
    }

    async fn send(&mut self, request: reqwest::RequestBuilder) -> (StatusCode, String) {
        let answer = request
            .header("cookie", self.cookies.join("; "))
            .send()
            .await
            .expect("an answer");
        for cookie in answer.headers().get_all("set-cookie") {
            let cookie = cookie
                .to_str()
                .expect("plain")
                .split(';')
                .next()
                .unwrap_or_default()
                .to_owned();
            let name = cookie.split('=').next().unwrap_or_default().to_owned();
            self.cookies
                .retain(|kept| kept.split('=').next() != Some(name.as_str()));
            self.cookies.push(cookie);
        }
        (answer.status(), answer.text().await.expect("a page"))
    }

    async fn sign_in(&mut self, password: &str) -> StatusCode {
        let (_, page) = self.visit("/sign-in").await;
        let form = Form::find(&page, "/sign-in")
            .fill("login", "admin")
            .fill("password", password);
        self.submit(&form).await.0
    }
}

#[tokio::test]
async fn a_person_signs_in_sees_the_dead_letter_and_replays_it() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    api.emit(
        "acme",
        json!({ "id": "evt_page", "type": "invoice.paid", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "dead", 1).await;

    let mut person = Person::new(&program);
    assert!(
        person.visit("/dead-letters").await.0.is_redirection(),
        "nothing is shown to a stranger"
    );
    assert!(person.sign_in(ADMIN_PASSWORD).await.is_redirection());
    let (status, page) = person.visit("/dead-letters").await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        page.contains("evt_page") && page.contains("every attempt of the schedule failed"),
        "{page}"
    );

    receiver.answer(Answer::Status(204));
    let form = Form::find(&page, "/replay");
    assert!(person.submit(&form).await.0.is_redirection());
    assert_eq!(receiver.wait_for(2).await[1].event_id(), "evt_page");
    let delivered = api.wait_for_state("acme", "delivered", 1).await;
    let id = delivered[0]["id"].as_str().expect("an id");
    let (status, page) = person.visit(&format!("/deliveries/{id}")).await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        page.contains("500") && page.contains("204"),
        "both attempts are shown: {page}"
    );
    assert!(!person.visit("/dead-letters").await.1.contains("evt_page"));
}

#[tokio::test]
async fn a_wrong_password_and_a_form_without_its_token_are_refused() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    api.emit(
        "acme",
        json!({ "id": "evt_page", "type": "invoice.paid", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "dead", 1).await;
    let mut person = Person::new(&program);
    assert!(!person.sign_in("wrong password").await.is_redirection());
    assert!(person.visit("/deliveries").await.0.is_redirection());
    assert!(person.sign_in(ADMIN_PASSWORD).await.is_redirection());
    let (_, page) = person.visit("/dead-letters").await;
    let mut form = Form::find(&page, "/replay");
    form.fields.clear();
    assert!(person.submit(&form).await.0.is_client_error());
    assert_eq!(receiver.received().len(), 1);
}
