//! `warmroute config init`: writes a commented configuration for one model.

use std::io::{BufRead as _, IsTerminal as _, Write};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use minijinja::Environment;
use serde_json::{Value, json};
use warmroute_server::config::Config;
use warmroute_server::serve::EXIT_MISCONFIGURED;
use warmroute_settings::escape_references;

use crate::cmd::cli::{ConfigInitArgs, InitEngine};

/// vLLM's default.
const DEFAULT_BLOCK_SIZE: NonZeroU32 = NonZeroU32::new(16).expect("16 is not zero");
/// First port of KV events in the documentation of vLLM.
const DEFAULT_EVENTS_PORT: u16 = 5557;
/// Distance of the replay port from the port of the events.
const REPLAY_PORT_OFFSET: u16 = 100;
/// Names of tokenizer files, in the order of preference.
const TOKENIZER_FILES: [&str; 2] = ["tokenizer.json", "tokenizer.json.gz"];

/// Template of the configuration.
const TEMPLATE: &str = include_str!("init.yaml.jinja");
/// Schema that editors look for beside the configuration.
const SCHEMA_FILE: &str = "warmroute.schema.json";

/// Values of a first configuration.
#[derive(Clone, Debug)]
struct InitValues {
    model: String,
    /// Path of the tokenizer file.
    tokenizer: Option<PathBuf>,
    engine: InitEngine,
    workers: InitWorkers,
    block_size: NonZeroU32,
    events_port: u16,
}

/// Source of the workers.
#[derive(Clone, Debug)]
enum InitWorkers {
    List(Vec<SocketAddr>),
    Pool(String),
    /// Name and port.
    Dns(String, u16),
}

/// Writes the configuration and returns the exit code.
pub(super) fn run(
    args: &ConfigInitArgs,
    out: &mut impl Write,
    err: &mut impl Write,
) -> anyhow::Result<u8> {
    let is_terminal = std::io::stdin().is_terminal();
    let read = InitValues::read(args, &mut |question, default| {
        if !is_terminal {
            return Ok(None);
        }
        write!(err, "{question} [{default}]: ")?;
        err.flush()?;
        let mut answer = String::new();
        std::io::stdin().lock().read_line(&mut answer)?;
        let answer = answer.trim();
        Ok((!answer.is_empty()).then(|| answer.to_owned()))
    });
    let values = match read {
        Ok(values) => values,
        Err(error) => {
            writeln!(err, "warmroute: {error:#}")?;
            return Ok(EXIT_MISCONFIGURED);
        }
    };
    if args.output == Path::new("-") {
        out.write_all(values.render()?.as_bytes())?;
        return Ok(0);
    }
    let text = format!(
        "# yaml-language-server: $schema={SCHEMA_FILE}\n{}",
        values.render()?
    );
    // Fails if the file exists.
    let mut file = std::fs::File::create_new(&args.output)
        .with_context(|| format!("cannot create {}", args.output.display()))?;
    file.write_all(text.as_bytes())?;
    let path = args.output.display();
    writeln!(err, "wrote {path}; next: warmroute check {path}")?;
    let schema = args.output.with_file_name(SCHEMA_FILE);
    writeln!(
        err,
        "for completion in editors: warmroute config schema > {}",
        schema.display()
    )?;
    if let Err(errors) = Config::load(&args.output) {
        for error in errors {
            writeln!(err, "to change: {error}")?;
        }
    }
    Ok(0)
}

impl InitValues {
    /// Returns the values if they make a valid configuration. Files in the model directory may be
    /// missing.
    fn read(
        args: &ConfigInitArgs,
        ask: &mut dyn FnMut(&str, &str) -> anyhow::Result<Option<String>>,
    ) -> anyhow::Result<Self> {
        // Checked first, because answers would be lost.
        if args.output != Path::new("-") && args.output.exists() {
            let file = args.output.display();
            bail!("--output: {file} exists; remove it, or choose another file");
        }
        let values = Self::resolve(args, ask)?;
        values.check()?;
        let without_files = Self {
            tokenizer: None,
            ..values.clone()
        };
        match Config::parse(&args.output, without_files.render()?.as_bytes()) {
            Ok(_) => Ok(values),
            Err(errors) => {
                let errors: Vec<_> = errors.iter().map(|error| error.problem.as_str()).collect();
                bail!(
                    "these values make no valid configuration: {}",
                    errors.join("; ")
                )
            }
        }
    }

    /// Checks the values. The errors name the arguments.
    fn check(&self) -> anyhow::Result<()> {
        if self.model.is_empty() {
            bail!(
                "--model: the name is empty; write the name under which the engines serve the model"
            );
        }
        if let Some(directory) = self.tokenizer.as_deref().and_then(Path::parent)
            && !directory.is_dir()
        {
            bail!(
                "--model-dir: {} is not a directory; write the one with the model's tokenizer.json",
                directory.display()
            );
        }
        let mut ranks = 1;
        match &self.workers {
            InitWorkers::List(addresses) => {
                let repeated = |(index, address)| addresses[..index].contains(address);
                if let Some((_, address)) =
                    addresses.iter().enumerate().find(|&item| repeated(item))
                {
                    bail!("--worker: {address} is given twice");
                }
                if let Some(address) = addresses.iter().find(|address| address.port() == 0) {
                    bail!("--worker: {address} has port 0; write the port of the engine");
                }
                let of_host = |host: IpAddr| {
                    let same = addresses.iter().filter(|address| address.ip() == host);
                    same.count()
                };
                let counts = addresses.iter().map(|address| of_host(address.ip()));
                ranks = counts.max().unwrap_or(1);
            }
            InitWorkers::Pool(name) if name.is_empty() => {
                bail!("--pool: the name is empty; write that of an InferencePool");
            }
            InitWorkers::Dns(name, port) if name.is_empty() || *port == 0 => {
                bail!("--dns: expected NAME:PORT, for example vllm.default.svc:8000");
            }
            InitWorkers::Pool(_) | InitWorkers::Dns(..) => {}
        }
        self.check_ports(ranks)
    }

    /// Checks the ports of the KV events of a host with a number of workers.
    fn check_ports(&self, workers: usize) -> anyhow::Result<()> {
        if workers > usize::from(REPLAY_PORT_OFFSET) {
            bail!(
                "--worker: {workers} workers have the same host, but the ports of their KV events overlap with more \
                 than {REPLAY_PORT_OFFSET}"
            );
        }
        let offset = match self.engine {
            InitEngine::Vllm => usize::from(REPLAY_PORT_OFFSET) + workers - 1,
            InitEngine::Sglang => workers - 1,
        };
        let last = usize::from(u16::MAX) - offset;
        let port = self.events_port;
        if port == 0 || usize::from(port) > last {
            bail!(
                "--kv-events-port: {port} must be from 1 to {last}, because the ports of the engines follow it"
            );
        }
        Ok(())
    }

    /// Uses the values of the arguments, and prompts for the others. `ask` gets a question and the
    /// default, and returns `None` for the default.
    fn resolve(
        args: &ConfigInitArgs,
        ask: &mut dyn FnMut(&str, &str) -> anyhow::Result<Option<String>>,
    ) -> anyhow::Result<Self> {
        let model = match &args.model {
            Some(model) => model.clone(),
            None => ask("Name of the model, as the engines serve it", "required")?
                .context("set --model NAME, the name under which the engines serve the model")?,
        };
        let directory = match &args.model_dir {
            Some(directory) => Some(directory.clone()),
            None => {
                ask("Directory with tokenizer.json and config.json", "none")?.map(PathBuf::from)
            }
        };
        let has_source = !args.workers.is_empty() || args.pool.is_some() || args.dns.is_some();
        let workers = if has_source {
            InitWorkers::of_args(args)?
        } else {
            let answer = ask("Addresses of the engines, as IP:PORT", "127.0.0.1:8000")?;
            InitWorkers::parse_list(answer.as_deref().unwrap_or("127.0.0.1:8000"))?
        };
        Ok(Self {
            model,
            tokenizer: directory.map(|directory| find_tokenizer(&directory)),
            engine: args.engine.unwrap_or(InitEngine::Vllm),
            workers,
            block_size: args.block_size.unwrap_or(DEFAULT_BLOCK_SIZE),
            events_port: args.kv_events_port.unwrap_or(DEFAULT_EVENTS_PORT),
        })
    }

    fn render(&self) -> Result<String, minijinja::Error> {
        let workers = match &self.workers {
            InitWorkers::List(addresses) => json!({"list": self.listed_workers(addresses)}),
            InitWorkers::Pool(name) => json!({"pool": quoted(name)}),
            InitWorkers::Dns(name, port) => json!({"dns": quoted(name), "port": port}),
        };
        let tokenizer = self.tokenizer.as_deref().map(Path::to_string_lossy);
        let values = json!({
            "model": quoted(&self.model),
            "tokenizer": tokenizer.map(|file| quoted(&file)),
            "is_vllm": self.engine == InitEngine::Vllm,
            "block_size": self.block_size,
            "events_port": self.events_port,
            "replay_port": self.events_port.saturating_add(REPLAY_PORT_OFFSET),
            "workers": workers,
        });
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_keep_trailing_newline(true);
        environment.render_str(TEMPLATE, values)
    }

    /// Returns the listed workers. Those of one host have consecutive ports for their events.
    fn listed_workers(&self, addresses: &[SocketAddr]) -> Vec<Value> {
        let worker = |(index, address): (usize, &SocketAddr)| {
            let is_same_host = |other: &&SocketAddr| other.ip() == address.ip();
            let before = addresses[..index].iter().filter(is_same_host).count();
            let offset = u16::try_from(before).unwrap_or(u16::MAX);
            let port = self.events_port.saturating_add(offset);
            let host = match address.ip() {
                IpAddr::V4(ip) => ip.to_string(),
                IpAddr::V6(ip) => format!("[{ip}]"),
            };
            json!({
                "address": address,
                "host": host,
                "port": port,
                "replay_port": port.saturating_add(REPLAY_PORT_OFFSET),
            })
        };
        addresses.iter().enumerate().map(worker).collect()
    }
}

impl InitWorkers {
    fn of_args(args: &ConfigInitArgs) -> anyhow::Result<Self> {
        match (&args.pool, &args.dns) {
            (Some(pool), _) => Ok(Self::Pool(pool.clone())),
            (None, Some(name)) => {
                let (name, port) = name
                    .rsplit_once(':')
                    .and_then(|(name, port)| Some((name.to_owned(), port.parse().ok()?)))
                    .context("--dns: expected NAME:PORT, for example vllm.default.svc:8000")?;
                Ok(Self::Dns(name, port))
            }
            (None, None) => Ok(Self::List(args.workers.clone())),
        }
    }

    /// Parses addresses separated by spaces or commas.
    fn parse_list(text: &str) -> anyhow::Result<Self> {
        let parts = text.split([' ', ',']).filter(|part| !part.is_empty());
        let addresses: Vec<SocketAddr> = parts
            .map(|part| {
                part.parse()
                    .map_err(|_| anyhow!("`{part}` is not an IP:PORT, for example 10.0.0.5:8000"))
            })
            .collect::<anyhow::Result<_>>()?;
        if addresses.is_empty() {
            bail!("at least one address is required");
        }
        Ok(Self::List(addresses))
    }
}

/// Returns the absolute path of the tokenizer file in a directory.
fn find_tokenizer(directory: &Path) -> PathBuf {
    let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    TOKENIZER_FILES
        .iter()
        .map(|name| directory.join(name))
        .find(|file| file.is_file())
        .unwrap_or_else(|| directory.join(TOKENIZER_FILES[0]))
}

/// Returns a YAML string. JSON strings are YAML strings.
fn quoted(text: &str) -> String {
    Value::from(escape_references(text)).to_string()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cmd::cli::{Cli, CliCommand, ConfigCommand};

    fn arguments(more: &[&str]) -> ConfigInitArgs {
        let words = ["warmroute", "config", "init"].iter().chain(more);
        match Cli::try_parse_from(words).unwrap().command {
            CliCommand::Config(ConfigCommand::Init(args)) => args,
            other => panic!("unexpected command {other:?}"),
        }
    }

    fn text_of(more: &[&str]) -> String {
        let mut ask = |_: &str, _: &str| Ok(None);
        InitValues::resolve(&arguments(more), &mut ask)
            .unwrap()
            .render()
            .unwrap()
    }

    #[test]
    fn written_configurations_are_valid() {
        let cases: [&[&str]; 5] = [
            &[],
            &[
                "--worker",
                "10.0.0.1:8000",
                "--worker",
                "10.0.0.1:8001",
                "--worker",
                "[fd00::1]:80",
            ],
            &["--pool", "vllm-qwen", "--kv-events-port", "6000"],
            &[
                "--dns",
                "vllm.default.svc.cluster.local:8000",
                "--engine",
                "sglang",
            ],
            &["--block-size", "32"],
        ];
        for case in cases {
            let text = text_of(&[&["--model", "a: ${b}"], case].concat());
            let config = Config::parse(Path::new("w.yaml"), text.as_bytes())
                .unwrap_or_else(|errors| panic!("{errors:?}\n{text}"));
            assert_eq!(config.models[0].name.as_str(), "a: ${b}");
        }
    }

    #[test]
    fn workers_of_a_host_have_different_event_ports() {
        let text = text_of(&[
            "--model",
            "m",
            "--worker",
            "10.0.0.1:8000",
            "--worker",
            "10.0.0.1:8001",
            "--worker",
            "10.0.0.2:8000",
        ]);
        let ports = [
            "10.0.0.1:5557",
            "10.0.0.1:5558",
            "10.0.0.2:5557",
            "10.0.0.1:5658",
        ];
        for port in ports {
            assert!(text.contains(&format!("tcp://{port}")), "{port}: {text}");
        }
    }

    #[test]
    fn answers_replace_missing_arguments() {
        let mut answers = ["m", "/models/m", "10.0.0.1:1, 10.0.0.2:2"].into_iter();
        let mut ask = |_: &str, _: &str| Ok(answers.next().map(str::to_owned));
        let values = InitValues::resolve(&arguments(&[]), &mut ask).unwrap();
        let text = values.render().unwrap();
        for part in ["name: \"m\"", "/models/m/tokenizer.json", "10.0.0.2:2"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let mut no_answer = |_: &str, _: &str| Ok(None);
        let error = InitValues::resolve(&arguments(&[]), &mut no_answer).unwrap_err();
        assert!(error.to_string().contains("--model"), "{error}");
    }

    #[test]
    fn invalid_values_name_the_flag() {
        let many: Vec<String> = (1..=101).map(|port| format!("10.0.0.1:{port}")).collect();
        let many: Vec<&str> = many
            .iter()
            .flat_map(|worker| ["--worker", worker])
            .collect();
        let twice = ["--worker", "10.0.0.1:80"].repeat(2);
        let cases: [(&[&str], &str); 9] = [
            (
                &["--model-dir", "/models/none"],
                "--model-dir: /models/none is not a directory",
            ),
            (&["--model", ""], "--model: the name is empty"),
            (
                &["--kv-events-port", "65535"],
                "--kv-events-port: 65535 must be from 1 to 65435",
            ),
            (&["--kv-events-port", "0"], "--kv-events-port: 0"),
            (&twice, "--worker: 10.0.0.1:80 is given twice"),
            (
                &["--worker", "10.0.0.1:0"],
                "--worker: 10.0.0.1:0 has port 0",
            ),
            (&many, "--worker: 101 workers have the same host"),
            (&["--pool", ""], "--pool: the name is empty"),
            (&["--dns", ":8000"], "--dns: expected NAME:PORT"),
        ];
        for (case, expected) in cases {
            let model = if case[0] == "--model" {
                &[][..]
            } else {
                &["--model", "m"]
            };
            let args = arguments(&[model, case, &["--output", "-"]].concat());
            let error = InitValues::read(&args, &mut |_, _| Ok(None)).unwrap_err();
            assert!(
                error.to_string().starts_with(expected),
                "{expected}: {error}"
            );
        }
        let sglang = [
            "--model",
            "m",
            "--engine",
            "sglang",
            "--kv-events-port",
            "65535",
            "-o",
            "-",
        ];
        assert!(InitValues::read(&arguments(&sglang), &mut |_, _| Ok(None)).is_ok());
    }

    #[test]
    fn existing_file_is_found_before_the_questions() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("w.yaml");
        std::fs::write(&file, "").unwrap();
        let args = arguments(&["--output", file.to_str().unwrap()]);
        let error = InitValues::read(&args, &mut |_, _| panic!("a question")).unwrap_err();
        assert!(error.to_string().starts_with("--output: "), "{error}");
    }
}
