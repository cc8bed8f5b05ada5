//! A real browser: Chromium without a window, driven over WebDriver. It is seen as a person sees it: what is clicked must
//! be there and visible.
//! Invariant: each has a port and a profile of its own, and nothing of it is left when it is dropped.

use std::{
    collections::BTreeSet,
    fmt::Debug,
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::Duration,
};

use fantoccini::{
    Client, ClientBuilder, Locator,
    elements::Element,
    wd::{Capabilities, WebDriverCompatibleCommand, WindowHandle},
};
use hyper_util::client::legacy::connect::HttpConnector;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{ADMIN_PASSWORD, PATIENCE, Postrider, until};

/// A browser takes a few hundred megabytes, and both cores while it starts.
static ROOM: Semaphore = Semaphore::const_new(2);

const WINDOW: (u32, u32) = (1280, 900);
/// How long something may take to appear on a page.
const APPEARS: Duration = Duration::from_secs(20);

pub(crate) struct Browser {
    pub(crate) client: Client,
    driver: Driver,
    _profile: TempDir,
    _room: SemaphorePermit<'static>,
}

/// The driver and, in the same process group, the browser that it starts.
struct Driver(Child);

impl Driver {
    fn start() -> (Self, u16) {
        let mut command = Command::new("chromedriver");
        command.arg("--port=0").process_group(0);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command
            .spawn()
            .expect("chromedriver starts: `make test` installs it");
        let stdout = child.stdout.take().expect("piped");
        let driver = Self(child);
        let (found, port) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let told = line.split("started successfully on port ").nth(1);
                let digits = told.map(|rest| rest.trim_end_matches('.').to_owned());
                if let Some(port) = digits.and_then(|digits| digits.parse().ok()) {
                    let _ = found.send(port);
                }
            }
        });
        let port = port.recv_timeout(PATIENCE).expect("chromedriver tells its port");
        (driver, port)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.wait();
    }
}

impl Browser {
    pub(crate) async fn start() -> Self {
        let room = ROOM.acquire().await.expect("never closed");
        let profile = TempDir::with_prefix("postrider-browser-").expect("a folder");
        let (driver, port) = tokio::task::spawn_blocking(Driver::start)
            .await
            .expect("a driver");
        let arguments = json!([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--disable-crash-reporter",
            "--hide-scrollbars",
            "--lang=en-GB",
            format!("--window-size={},{}", WINDOW.0, WINDOW.1),
            format!("--user-data-dir={}", profile.path().display()),
        ]);
        let mut wanted = Capabilities::new();
        wanted.insert("goog:chromeOptions".to_owned(), json!({ "args": arguments }));
        // An open alert fails what comes next, instead of being closed unseen.
        wanted.insert("unhandledPromptBehavior".to_owned(), json!("ignore"));
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(wanted)
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .expect("the browser starts");
        let browser = Self {
            client,
            driver,
            _profile: profile,
            _room: room,
        };
        browser.resize(WINDOW.0, WINDOW.1).await;
        browser
    }

    /// Opens another tab and speaks with it from here on.
    pub(crate) async fn new_tab(&self) {
        let tab = self.client.new_window(true).await.expect("a tab").handle;
        self.to_tab(&tab).await;
    }

    pub(crate) async fn current_tab(&self) -> WindowHandle {
        self.client.window().await.expect("a tab")
    }

    pub(crate) async fn to_tab(&self, tab: &WindowHandle) {
        self.client.switch_to_window(tab.clone()).await.expect("the tab");
    }

    /// Tells the page that it is in the background, or in front again. Without a screen every tab is in front.
    pub(crate) async fn hide(&self, is_hidden: bool) {
        let source = format!(
            "Object.defineProperty(document, 'hidden', {{ value: {is_hidden}, configurable: true }});
             document.dispatchEvent(new Event('visibilitychange'))"
        );
        self.script(&source).await;
    }

    /// Ends the browser the polite way; a drop ends it the other way.
    pub(crate) async fn close(self) {
        let _ = self.client.clone().close().await;
        drop(self.driver);
    }

    /// As the admin.
    pub(crate) async fn sign_in(&self, program: &Postrider) {
        self.open(&program.url("/sign-in")).await;
        self.fill("input[name=login]", "admin").await;
        self.fill("input[name=password]", ADMIN_PASSWORD).await;
        self.click("main button").await;
        self.see("nav.menu").await;
    }

    pub(crate) async fn open(&self, url: &str) {
        self.client.goto(url).await.expect("a page");
    }

    pub(crate) async fn address(&self) -> String {
        self.client.current_url().await.expect("an address").to_string()
    }

    /// Waits until it is on the page.
    pub(crate) async fn see(&self, css: &str) -> Element {
        let found = self
            .client
            .wait()
            .at_most(APPEARS)
            .for_element(Locator::Css(css))
            .await;
        match found {
            Ok(element) => element,
            Err(error) => panic!(
                "{css} is not on {}: {error}\n{}",
                self.address().await,
                self.words().await
            ),
        }
    }

    pub(crate) async fn click(&self, css: &str) {
        self.see(css).await.click().await.expect(css);
    }

    /// The link or button with exactly these words.
    pub(crate) async fn press(&self, words: &str) {
        let path = format!("//*[self::a or self::button][normalize-space()='{words}']");
        let found = self
            .client
            .wait()
            .at_most(APPEARS)
            .for_element(Locator::XPath(&path))
            .await;
        let Ok(element) = found else {
            panic!(
                "nothing says {words} on {}\n{}",
                self.address().await,
                self.words().await
            )
        };
        element.click().await.expect(words);
    }

    pub(crate) async fn fill(&self, css: &str, text: &str) {
        let field = self.see(css).await;
        field.clear().await.expect(css);
        field.send_keys(text).await.expect(css);
    }

    /// All that can be read on the page.
    pub(crate) async fn words(&self) -> String {
        let words = self.script("return document.body.innerText").await;
        words.as_str().unwrap_or_default().to_owned()
    }

    /// Waits until the page says this, by itself or after it is loaded again.
    pub(crate) async fn read(&self, words: &str) {
        let what = format!("the page says {words}");
        until(&what, || async {
            self.words().await.contains(words).then_some(())
        })
        .await;
    }

    pub(crate) async fn script(&self, source: &str) -> Value {
        self.client.execute(source, Vec::new()).await.expect(source)
    }

    pub(crate) async fn resize(&self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.tell("Emulation.setDeviceMetricsOverride", size).await;
    }

    /// `light` or `dark`, as the reader's system would have it.
    pub(crate) async fn scheme(&self, scheme: &str) {
        let features = json!({ "features": [
            { "name": "prefers-color-scheme", "value": scheme },
            { "name": "prefers-reduced-motion", "value": "reduce" },
        ] });
        self.tell("Emulation.setEmulatedMedia", features).await;
    }

    /// The reader's time zone, by its name.
    pub(crate) async fn time_zone(&self, zone: &str) {
        self.tell("Emulation.setTimezoneOverride", json!({ "timezoneId": zone }))
            .await;
    }

    /// Presses keys where the focus is.
    pub(crate) async fn type_keys(&self, keys: &str) {
        let focused = self.client.active_element().await.expect("a focus");
        focused.send_keys(keys).await.expect(keys);
    }

    pub(crate) async fn picture(&self, file: &Path) {
        let png = self.client.screenshot().await.expect("a picture");
        std::fs::write(file, png).expect("written");
    }

    /// Where the page leads to on this site.
    pub(crate) async fn links(&self) -> Vec<String> {
        let links = self
            .script(
                "return [...document.links].filter((link) => link.origin === location.origin)
                    .map((link) => link.pathname + link.search)",
            )
            .await;
        let links = links.as_array().expect("a list").iter();
        links.filter_map(|link| Some(link.as_str()?.to_owned())).collect()
    }

    /// What axe-core has against the page: the rule, what it is about, and where. Only colours can be wrong in one scheme
    /// and right in the other, so `rules` may be those alone.
    pub(crate) async fn violations(&self, rules: &str) -> Vec<String> {
        let axe = std::fs::read_to_string(axe()).expect("axe-core: `make test` installs it");
        self.client
            .execute(&axe, Vec::new())
            .await
            .expect("axe-core loads");
        let source = "const done = arguments[arguments.length - 1];
            const only = arguments[0] === 'all' ? {} : { runOnly: [arguments[0]] };
            axe.run(document, { resultTypes: ['violations'], ...only }).then(
                (found) => done(found.violations.flatMap((one) => one.nodes.map((node) =>
                    `${one.id}: ${one.help}: ${node.html.slice(0, 200)} ${node.failureSummary}`))),
                (error) => done([String(error)]));";
        let found = self
            .client
            .execute_async(source, vec![json!(rules)])
            .await
            .expect("axe-core runs");
        let found = found.as_array().expect("a list").clone();
        found
            .iter()
            .map(|one| one.as_str().unwrap_or_default().to_owned())
            .collect()
    }

    /// A command of the browser itself, which WebDriver does not have.
    async fn tell(&self, method: &'static str, parameters: Value) {
        let command = Devtools { method, parameters };
        self.client.issue_cmd(command).await.expect(method);
    }
}

/// Walks over the pages by their links: of pages that differ only in an id, one.
pub(crate) struct Crawl {
    waiting: Vec<String>,
    known: BTreeSet<String>,
}

/// More kinds of pages than this is a crawl that goes in circles.
const KINDS_MAX: usize = 100;

impl Crawl {
    pub(crate) fn from(start: &[String]) -> Self {
        Self {
            waiting: start.to_vec(),
            known: start.iter().map(|page| kind_of(page)).collect(),
        }
    }

    pub(crate) fn next(&mut self) -> Option<String> {
        self.waiting.pop()
    }

    pub(crate) fn learn(&mut self, links: Vec<String>) {
        for link in links {
            let is_page = NO_PAGES.iter().all(|start| !link.starts_with(start));
            if is_page && self.known.insert(kind_of(&link)) {
                self.waiting.push(link);
            }
        }
        assert!(self.known.len() <= KINDS_MAX, "{:?}", self.known);
    }
}

/// What is not for people, or is a document of its own.
const NO_PAGES: [&str; 7] = [
    "/v1/",
    "/docs",
    "/openapi.json",
    "/assets/",
    "/live/",
    "/audit/export",
    "/deliveries/export",
];

/// A longer part of a path is an id.
const IDLESS_CHARS_MAX: usize = 16;

/// Its path with ids left out: a filter makes no other page.
fn kind_of(link: &str) -> String {
    let path = link.split('?').next().unwrap_or_default();
    let parts = path.split('/').map(|part| {
        let is_id = part.contains(['_', '.', '@'])
            || part.len() > IDLESS_CHARS_MAX
            || part == "acme"
            || part == "globex";
        if is_id { "*" } else { part }
    });
    parts.collect::<Vec<&str>>().join("/")
}

fn axe() -> PathBuf {
    let modules = std::env::var_os("POSTRIDER_TEST_NODE_PATH");
    let modules =
        modules.expect("POSTRIDER_TEST_NODE_PATH is not set: `make test` installs axe-core and sets it");
    PathBuf::from(modules).join("axe-core/axe.min.js")
}

#[derive(Debug)]
struct Devtools {
    method: &'static str,
    parameters: Value,
}

impl WebDriverCompatibleCommand for Devtools {
    fn endpoint(&self, base: &url::Url, session: Option<&str>) -> Result<url::Url, url::ParseError> {
        base.join(&format!(
            "session/{}/goog/cdp/execute",
            session.unwrap_or_default()
        ))
    }

    fn method_and_body(&self, _: &url::Url) -> (http::Method, Option<String>) {
        let body = json!({ "cmd": self.method, "params": self.parameters });
        (http::Method::POST, Some(body.to_string()))
    }
}
