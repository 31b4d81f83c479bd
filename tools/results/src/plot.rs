//! Curves on logarithmic axes, where a power law is a straight line with the exponent as its slope.

use anyhow::anyhow;
use plotters::prelude::*;

use super::CurvePoint;

/// A varied parameter and the time that depends on it.
pub(super) struct GrowthCurve<'p> {
    pub(super) name: &'p str,
    pub(super) series: Vec<CurveSeries<'p>>,
}

/// The points of one state.
pub(super) struct CurveSeries<'p> {
    pub(super) name: &'p str,
    points: Vec<(f64, f64)>,
}

/// Groups points into curves, in their order.
pub(super) fn curves(points: &[CurvePoint]) -> Vec<GrowthCurve<'_>> {
    let mut curves: Vec<GrowthCurve<'_>> = Vec::new();
    for CurvePoint {
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
                curves.push(GrowthCurve {
                    name: curve,
                    series: Vec::new(),
                });
                curves.len() - 1
            });
        let known = &mut curves[at].series;
        match known.iter_mut().find(|known| known.name == series) {
            Some(known) => known.points.push((*x, *y)),
            None => known.push(CurveSeries {
                name: series,
                points: vec![(*x, *y)],
            }),
        }
    }
    curves
}

impl CurveSeries<'_> {
    /// Describes the slope over all points, and between the last two points, where constant costs
    /// have the least influence.
    pub(super) fn slope(&self) -> String {
        let [.., (x1, y1), (x2, y2)] = self.points[..] else {
            return "one point".into();
        };
        let last = (y2 / y1).ln() / (x2 / x1).ln();
        let (first_x, first_y) = self.points[0];
        format!(
            "{} us at {} to {} us at {}; slope {:.2} over all of it, {last:.2} at its end (1 is linear, 0 is constant)",
            number(first_y),
            number(first_x),
            number(y2),
            number(x2),
            self.exponent(),
        )
    }

    /// Returns the exponent of the best fit.
    fn exponent(&self) -> f64 {
        let logs: Vec<(f64, f64)> = self.points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
        let count = logs.len() as f64;
        let mean = |axis: fn(&(f64, f64)) -> f64| logs.iter().map(axis).sum::<f64>() / count;
        let x = mean(|log| log.0);
        let y = mean(|log| log.1);
        let covariance: f64 = logs.iter().map(|log| (log.0 - x) * (log.1 - y)).sum();
        covariance / logs.iter().map(|log| (log.0 - x).powi(2)).sum::<f64>()
    }
}

/// Draws the curve as SVG.
pub(super) fn draw(curve: &GrowthCurve<'_>) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (720, 420)).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let points = || curve.series.iter().flat_map(|series| &series.points);
        let range = |axis: fn(&(f64, f64)) -> f64| {
            let min = points().map(axis).fold(f64::INFINITY, f64::min);
            (min / 1.3)..(points().map(axis).fold(0.0, f64::max) * 1.3)
        };
        let mut chart = ChartBuilder::on(&area)
            .margin(16)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(
                range(|point| point.0).log_scale(),
                range(|point| point.1).log_scale(),
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

/// Formats a number with three significant digits.
pub(super) fn number(value: f64) -> String {
    let digits = (2 - value.abs().max(1e-9).log10().floor() as i32).clamp(0, 4) as usize;
    format!("{value:.digits$}")
}

fn failed<E: std::error::Error + Send + Sync>(error: E) -> anyhow::Error {
    anyhow!("{error}")
}
