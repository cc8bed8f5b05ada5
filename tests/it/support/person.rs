//! A person without a browser: reads the pages as text, fills in their forms, keeps the cookies.

use reqwest::{Client, StatusCode};

use super::{ADMIN_PASSWORD, Postrider};

/// A form as it stands in a page: where it goes, and its fields with their values.
pub(crate) struct Form {
    action: String,
    fields: Vec<(String, String)>,
}

impl Form {
    /// The first form of a page whose action contains this.
    pub(crate) fn find(page: &str, action_part: &str) -> Self {
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

    pub(crate) fn fill(mut self, name: &str, value: &str) -> Self {
        let field = self.fields.iter_mut().find(|(field, _)| field == name);
        field.unwrap_or_else(|| panic!("the form has no field {name}")).1 = value.to_owned();
        self
    }

    /// With a field that is no `<input>`.
    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.fields.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Without its fields, as a stranger would send it.
    pub(crate) fn forget(&mut self) {
        self.fields.clear();
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
pub(crate) struct Person<'p> {
    program: &'p Postrider,
    client: Client,
    cookies: Vec<String>,
}

impl<'p> Person<'p> {
    pub(crate) fn new(program: &'p Postrider) -> Self {
        let client = crate::support::http_client()
            .redirect(reqwest::redirect::Policy::none())
            .build();
        Self {
            program,
            client: client.expect("a client"),
            cookies: Vec::new(),
        }
    }

    /// Behind a proxy, which says that the browser is at this address.
    pub(crate) fn behind_proxy(program: &'p Postrider, address: &str) -> Self {
        let address = address.parse().expect("an address");
        let headers = reqwest::header::HeaderMap::from_iter([(
            reqwest::header::HeaderName::from_static("x-forwarded-for"),
            address,
        )]);
        let client = crate::support::http_client()
            .default_headers(headers)
            .redirect(reqwest::redirect::Policy::none())
            .build();
        Self {
            client: client.expect("a client"),
            ..Self::new(program)
        }
    }

    /// In the middle of a session.
    pub(crate) fn with_cookie(program: &'p Postrider, cookie: &str) -> Self {
        let mut person = Self::new(program);
        person.cookies.push(cookie.to_owned());
        person
    }

    /// What the browser sends.
    pub(crate) fn cookie(&self) -> String {
        self.cookies.join("; ")
    }

    pub(crate) async fn visit(&mut self, path: &str) -> (StatusCode, String) {
        let request = self.client.get(self.program.url(path));
        self.send(request).await
    }

    pub(crate) async fn submit(&mut self, form: &Form) -> (StatusCode, String) {
        let request = self.request_of(form);
        self.send(request).await
    }

    /// The same, with what stands in the answer's head.
    pub(crate) async fn submit_whole(&mut self, form: &Form) -> Visited {
        let request = self.request_of(form);
        Visited::of(&self.answer(request).await)
    }

    fn request_of(&self, form: &Form) -> reqwest::RequestBuilder {
        self.client
            .post(self.program.url(&form.action))
            .header("content-type", "application/x-www-form-urlencoded")
            .header("origin", self.program.url(""))
            .body(form.encoded())
    }

    /// A form whose result is on the page that it leads to.
    pub(crate) async fn submit_and_follow(&mut self, form: &Form) -> (StatusCode, String) {
        let answer = self.answer(self.request_of(form)).await;
        let location = answer.headers().get("location").cloned();
        let status = answer.status();
        match location {
            Some(location) => self.visit(location.to_str().expect("plain")).await,
            None => (status, answer.text().await.expect("a page")),
        }
    }

    /// A form that is on no page, with the token of this session.
    pub(crate) async fn post(&mut self, path: &str, fields: &[(&str, &str)]) -> (StatusCode, String) {
        let form = self.own_form(path, fields).await;
        self.submit(&form).await
    }

    pub(crate) async fn post_and_follow(
        &mut self,
        path: &str,
        fields: &[(&str, &str)],
    ) -> (StatusCode, String) {
        let form = self.own_form(path, fields).await;
        self.submit_and_follow(&form).await
    }

    async fn own_form(&mut self, path: &str, fields: &[(&str, &str)]) -> Form {
        let (_, page) = self.visit("/deliveries").await;
        let mut form = Form::find(&page, "/sign-out");
        form.action = path.to_owned();
        for (name, value) in fields {
            form = form.with(name, value);
        }
        form
    }

    /// What a mail program does with a link before anybody clicks it.
    pub(crate) async fn look_ahead(&mut self, path: &str) -> (StatusCode, String) {
        let request = self.client.head(self.program.url(path));
        self.send(request).await
    }

    /// The same as `visit`, with what stands in the answer's head.
    pub(crate) async fn visit_whole(&mut self, path: &str) -> Visited {
        let request = self.client.get(self.program.url(path));
        Visited::of(&self.answer(request).await)
    }

    /// An answer whose body comes bit by bit.
    pub(crate) async fn open(&mut self, path: &str) -> reqwest::Response {
        let request = self.client.get(self.program.url(path));
        self.answer(request).await
    }

    async fn send(&mut self, request: reqwest::RequestBuilder) -> (StatusCode, String) {
        let answer = self.answer(request).await;
        (answer.status(), answer.text().await.expect("a page"))
    }

    async fn answer(&mut self, request: reqwest::RequestBuilder) -> reqwest::Response {
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
        answer
    }

    pub(crate) async fn sign_in(&mut self, password: &str) -> StatusCode {
        self.sign_in_as("admin", password).await
    }

    pub(crate) async fn sign_in_as(&mut self, login: &str, password: &str) -> StatusCode {
        let (_, page) = self.visit("/sign-in").await;
        let form = Form::find(&page, "/sign-in")
            .fill("login", login)
            .fill("password", password);
        self.submit(&form).await.0
    }

    /// The admin.
    pub(crate) async fn signed_in(program: &'p Postrider) -> Self {
        let mut person = Self::new(program);
        assert!(person.sign_in(ADMIN_PASSWORD).await.is_redirection());
        person
    }
}

/// The head of an answer.
pub(crate) struct Visited {
    pub(crate) status: StatusCode,
    pub(crate) location: String,
    pub(crate) referrer_policy: String,
}

impl Visited {
    fn of(answer: &reqwest::Response) -> Self {
        let header = |name: &str| {
            let value = answer.headers().get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        Self {
            status: answer.status(),
            location: header("location"),
            referrer_policy: header("referrer-policy"),
        }
    }
}

/// The text of the element with this id, as a reader would copy it.
pub(crate) fn text_of(page: &str, id: &str) -> String {
    let element = page
        .split(&format!("id=\"{id}\""))
        .nth(1)
        .unwrap_or_else(|| panic!("no {id} in {page}"));
    let (_, inner) = element.split_once('>').expect("the tag ends");
    let inner = inner.split("</").next().unwrap_or_default();
    let written = [
        ("&#34;", "\""),
        ("&#39;", "'"),
        ("&#60;", "<"),
        ("&#62;", ">"),
        ("&#38;", "&"),
    ];
    written
        .iter()
        .fold(inner.to_owned(), |text, (from, to)| text.replace(from, to))
}
