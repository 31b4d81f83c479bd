//! Curves on axes that both count factors: there a straight line is a power, and its slope the exponent.

use anyhow::anyhow;
use plotters::prelude::*;

use super::Point;
use super::page::number;

/// What changes, and how the time goes with it.
pub(super) struct Curve<'p> {
    pub(super) name: &'p str,
    pub(super) series: Vec<Series<'p>>,
}

/// The points of one state.
pub(super) struct Series<'p> {
    pub(super) name: &'p str,
    points: Vec<(f64, f64)>,
}

/// The curves among some points, in their order.
pub(super) fn curves(points: &[Point]) -> Vec<Curve<'_>> {
    let mut curves: Vec<Curve<'_>> = Vec::new();
    for Point {
        curve,
        series,
        x,
        y,
    } in points
    {
        let at = curves
            .iter()
            .position(|known| known.name == curve)
            .unwrap_or_else(|| {
                curves.push(Curve {
                    name: curve,
                    series: Vec::new(),
                });
                curves.len() - 1
            });
        let known = &mut curves[at].series;
        match known.iter_mut().find(|known| known.name == series) {
            Some(known) => known.points.push((*x, *y)),
            None => known.push(Series {
                name: series,
                points: vec![(*x, *y)],
            }),
        }
    }
    curves
}

impl Series<'_> {
    /// The slope in words: over all points, and between the last two, where constants no longer hide it.
    pub(super) fn slope(&self) -> String {
        let [.., (x1, y1), (x2, y2)] = self.points[..] else {
            return "one point".into();
        };
        let last = (y2 / y1).ln() / (x2 / x1).ln();
        let (from, to) = (self.points[0], (x2, y2));
        format!(
            "{} us at {} to {} us at {}; slope {:.2} over all of it, {last:.2} at its end (1 is linear, 0 is constant)",
            number(from.1),
            number(from.0),
            number(to.1),
            number(to.0),
            self.exponent(),
        )
    }

    /// The exponent that fits best.
    fn exponent(&self) -> f64 {
        let logs: Vec<(f64, f64)> = self.points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
        let count = logs.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| logs.iter().map(of).sum::<f64>() / count;
        let (x, y) = (mean(|log| log.0), mean(|log| log.1));
        let over: f64 = logs.iter().map(|log| (log.0 - x) * (log.1 - y)).sum();
        over / logs.iter().map(|log| (log.0 - x).powi(2)).sum::<f64>()
    }
}

/// The curve as SVG.
pub(super) fn draw(curve: &Curve<'_>) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (720, 420)).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let points = || curve.series.iter().flat_map(|series| &series.points);
        let ends = |of: fn(&(f64, f64)) -> f64| {
            let least = points().map(of).fold(f64::INFINITY, f64::min);
            (least / 1.3)..(points().map(of).fold(0.0, f64::max) * 1.3)
        };
        let mut chart = ChartBuilder::on(&area)
            .margin(16)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(
                ends(|point| point.0).log_scale(),
                ends(|point| point.1).log_scale(),
            )
            .map_err(failed)?;
        let label = |value: &f64| number(*value);
        let mut mesh = chart.configure_mesh();
        mesh.x_desc(curve.name)
            .y_desc("us of CPU")
            .x_label_formatter(&label)
            .y_label_formatter(&label);
        mesh.light_line_style(WHITE).draw().map_err(failed)?;
        for (series, color) in curve.series.iter().zip([&BLUE, &RED, &GREEN]) {
            let line =
                LineSeries::new(series.points.iter().copied(), color.stroke_width(2)).point_size(3);
            let drawn = chart.draw_series(line).map_err(failed)?.label(series.name);
            drawn.legend(move |(x, y)| {
                PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2))
            });
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .border_style(BLACK)
            .draw()
            .map_err(failed)?;
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

fn failed<E: std::error::Error + Send + Sync>(error: E) -> anyhow::Error {
    anyhow!("{error}")
}
