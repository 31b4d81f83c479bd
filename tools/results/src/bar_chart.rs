//! Bar chart of the quickstart, with one bar for each of three policies.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;
use warmroute_testbed::policy_comparison::PolicyComparison;
use warmroute_testbed::replay::ReplaySummary;

use super::axis::PlotAxis;
use super::plot::plot_error;
use super::theme;

const SIZE: (u32, u32) = (800, 460);
/// Width of the left panel.
const LEFT: u32 = 250;
/// Height of title and legend.
const HEAD: u32 = 96;
/// Height of the notes.
const FOOT: u32 = 52;
/// Width of a group of bars, relative to the distance of groups.
const GROUP_WIDTH: f64 = 0.78;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A panel with groups of three bars.
struct BarPanel {
    title: &'static str,
    direction: &'static str,
    groups: Vec<BarGroup>,
    /// Decimal places of the values.
    digits: usize,
}

/// Values of the three policies.
struct BarGroup {
    name: &'static str,
    values: [f64; 3],
}

/// Draws the comparison as SVG.
pub(super) fn draw(comparison: &PolicyComparison) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&theme::BACKGROUND).map_err(plot_error)?;
        draw_head(&area, comparison)?;
        draw_notes(&area, comparison)?;
        let (_, panels) = area.split_vertically(HEAD);
        let (panels, _) = panels.split_vertically(SIZE.1 - HEAD - FOOT);
        let (left, right) = panels.split_horizontally(LEFT);
        draw_panel(&left, &cache_panel(comparison))?;
        draw_panel(&right, &latency_panel(comparison))?;
        area.present().map_err(plot_error)?;
    }
    Ok(theme::with_dark_colors(&svg))
}

fn group(
    name: &'static str,
    comparison: &PolicyComparison,
    figure: fn(&ReplaySummary) -> f64,
) -> BarGroup {
    let runs = [
        &comparison.round_robin,
        &comparison.linear,
        &comparison.default_run,
    ];
    BarGroup {
        name,
        values: runs.map(|run| figure(&run.clients)),
    }
}

fn cache_panel(comparison: &PolicyComparison) -> BarPanel {
    BarPanel {
        title: "Prompt tokens cached (%)",
        direction: "higher is better",
        groups: vec![group("all requests", comparison, |clients| {
            clients.hit_rate * 100.0
        })],
        digits: 1,
    }
}

fn latency_panel(comparison: &PolicyComparison) -> BarPanel {
    BarPanel {
        title: "Time (ms)",
        direction: "lower is better",
        groups: vec![
            group("first token, p50", comparison, |clients| {
                clients.ttft_ms.p50
            }),
            group("first token, p95", comparison, |clients| {
                clients.ttft_ms.p95
            }),
            group("first token, p99", comparison, |clients| {
                clients.ttft_ms.p99
            }),
            group("last token, mean", comparison, |clients| {
                clients.e2e_ms.mean
            }),
        ],
        digits: 0,
    }
}

/// Draws the title and the legend.
fn draw_head(area: &Area<'_>, comparison: &PolicyComparison) -> anyhow::Result<()> {
    let title = "Quickstart: the same chats with three routing policies";
    let title = Text::new(title, (20, 34), theme::title(20.0));
    area.draw(&title).map_err(plot_error)?;
    let subtitle = format!(
        "{} requests in each run, {} simulated engines, Envoy {}",
        comparison.requests, comparison.engines, comparison.envoy_version
    );
    let muted = theme::text(14.0, theme::MUTED_TEXT, HPos::Left);
    area.draw(&Text::new(subtitle, (20, 56), muted))
        .map_err(plot_error)?;
    let names = [
        "Envoy alone, round robin".to_owned(),
        "warmroute, linear".to_owned(),
        format!("warmroute, {} (default)", comparison.default_policy),
    ];
    for ((name, color), x) in names.into_iter().zip(theme::SERIES).zip([20, 250, 430]) {
        let square = Rectangle::new([(x, 71), (x + 13, 84)], color.filled());
        area.draw(&square).map_err(plot_error)?;
        let style = theme::text(14.0, theme::TEXT, HPos::Left);
        area.draw(&Text::new(name, (x + 20, 84), style))
            .map_err(plot_error)?;
    }
    Ok(())
}

/// Draws the notes: the simulated and the real parts, and the machine.
fn draw_notes(area: &Area<'_>, comparison: &PolicyComparison) -> anyhow::Result<()> {
    let notes = [
        "Simulated: the computing time of the engines (no GPU). Real: Envoy, warmroute, tokens, KV caches and KV events.".into(),
        format!(
            "{}. warmroute {}, {}. Every run begins with cold KV caches.",
            comparison.machine, comparison.warmroute_version, comparison.date
        ),
    ];
    for (note, y) in notes.into_iter().zip([30, 12]) {
        let style = theme::text(12.0, theme::MUTED_TEXT, HPos::Left);
        let note: Text<'_, (i32, i32), String> = Text::new(note, (20, SIZE.1 as i32 - y), style);
        area.draw(&note).map_err(plot_error)?;
    }
    Ok(())
}

fn draw_panel(area: &Area<'_>, panel: &BarPanel) -> anyhow::Result<()> {
    let direction = theme::text(12.0, theme::MUTED_TEXT, HPos::Left);
    for (text, y, style) in [
        (panel.title, 24, theme::title(13.0)),
        (panel.direction, 42, direction),
    ] {
        area.draw(&Text::new(text, (20, y), style))
            .map_err(plot_error)?;
    }
    let values = panel.groups.iter().flat_map(|group| group.values);
    let mut chart = ChartBuilder::on(area)
        .margin_left(20)
        .margin_right(20)
        .margin_top(58)
        .x_label_area_size(30)
        .y_label_area_size(32)
        .build_cartesian_2d(0.0..panel.groups.len() as f64, PlotAxis::linear(values))
        .map_err(plot_error)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .axis_style(theme::BACKGROUND)
        .bold_line_style(theme::GRID)
        .light_line_style(theme::BACKGROUND)
        .y_label_style(theme::font(12.0, theme::MUTED_TEXT))
        .draw()
        .map_err(plot_error)?;
    let bar_width = GROUP_WIDTH / 3.0;
    for (index, group) in panel.groups.iter().enumerate() {
        let start = index as f64 + (1.0 - GROUP_WIDTH) / 2.0;
        let bars = group.values.into_iter().zip(theme::SERIES).enumerate();
        for (bar, (value, color)) in bars {
            let left = start + bar as f64 * bar_width;
            let corners = [(left, 0.0), (left + bar_width * 0.92, value)];
            let style = theme::text(12.0, theme::TEXT, HPos::Center);
            let label = format!("{value:.0$}", panel.digits);
            let middle = left + bar_width * 0.46;
            let shapes = std::iter::once(Rectangle::new(corners, color.filled()));
            chart.draw_series(shapes).map_err(plot_error)?;
            let label =
                EmptyElement::at((middle, value)) + Text::new(label, (0, -4), style.clone());
            chart
                .draw_series(std::iter::once(label))
                .map_err(plot_error)?;
        }
        let style = theme::text(12.0, theme::MUTED_TEXT, HPos::Center);
        let name =
            EmptyElement::at((index as f64 + 0.5, 0.0)) + Text::new(group.name, (0, 20), style);
        chart
            .draw_series(std::iter::once(name))
            .map_err(plot_error)?;
    }
    Ok(())
}
