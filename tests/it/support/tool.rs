//! The program as a tool: run to its end, or read line by line while it runs.

use std::process::{Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

use super::{ADMIN_API_KEY, PATIENCE, Postrider};

/// What a tool wrote, and its status.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) status: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Said {
    /// The last line it wrote, as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        let line = self.out.lines().last().unwrap_or_default();
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }
}

fn command(program: &Postrider, arguments: &[&str], settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
    command
        .args(arguments)
        .env_clear()
        .env("POSTRIDER_URL", program.url(""))
        .env("POSTRIDER_API_KEY", ADMIN_API_KEY)
        .envs(settings.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

pub(crate) async fn tool(program: &Postrider, arguments: &[&str]) -> Said {
    tool_with(program, arguments, &[]).await
}

pub(crate) async fn tool_with(program: &Postrider, arguments: &[&str], settings: &[(&str, &str)]) -> Said {
    let ended = timeout(PATIENCE, command(program, arguments, settings).output()).await;
    let Output {
        status,
        stdout,
        stderr,
    } = ended.expect("it ends").expect("it starts");
    Said {
        status: status.code().unwrap_or(-1),
        out: String::from_utf8_lossy(&stdout).into_owned(),
        err: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// A tool that goes on until it is told to stop.
pub(crate) struct RunningTool {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl RunningTool {
    pub(crate) fn start(program: &Postrider, arguments: &[&str], settings: &[(&str, &str)]) -> Self {
        let mut child = command(program, arguments, settings).spawn().expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Self { child, lines }
    }

    pub(crate) async fn line(&mut self) -> String {
        let line = timeout(PATIENCE, self.lines.next_line()).await;
        line.expect("a line in time").expect("text").expect("a line")
    }

    pub(crate) async fn json_line(&mut self) -> serde_json::Value {
        let line = self.line().await;
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error} in {line}"))
    }

    /// Asked to stop; answers its status.
    pub(crate) async fn stop(&mut self) -> i32 {
        let pid = self
            .child
            .id()
            .and_then(|id| Pid::from_raw(id as i32))
            .expect("it runs");
        kill_process(pid, Signal::TERM).expect("a signal");
        let ended = timeout(PATIENCE, self.child.wait()).await;
        ended.expect("it ends").expect("a status").code().unwrap_or(-1)
    }

    /// Without a chance to say goodbye.
    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.expect("killed");
    }
}
