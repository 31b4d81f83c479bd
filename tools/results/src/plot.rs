//! Plots of curves. The axis of the parameter is logarithmic. The axis of the times is logarithmic if
//! they grow by a factor of ten or more: a power law is then a straight line with the exponent as its
//! slope.

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::axis::PlotAxis;
use super::{CurvePoint, theme};

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
    /// Returns the label of the legend.
    fn label(&self) -> String {
        match self.name {
            "cold" => "cold: a new prompt".into(),
            "warm" => "warm: a prompt seen before, with two new messages".into(),
            other => other.into(),
        }
    }

    /// Describes the slope over all points, and between the last two points, where constant costs
    /// have the least influence.
    pub(super) fn slope(&self) -> String {
        let [.., (x1, y1), (x2, y2)] = self.points[..] else {
            return "one point".into();
        };
        let last = (y2 / y1).ln() / (x2 / x1).ln();
        let (first_x, first_y) = self.points[0];
        format!(
            "{} µs at {} to {} µs at {}; slope {:.2} over all of it, {last:.2} at its end (1 is linear, 0 is constant)",
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

/// Draws the curve as SVG, with a line about the measurement below the title.
pub(super) fn draw(curve: &GrowthCurve<'_>, measurement: &str) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (720, 420)).into_drawing_area();
        area.fill(&theme::BACKGROUND).map_err(plot_error)?;
        let points = curve.series.iter().flat_map(|series| &series.points);
        let x_axis = PlotAxis::logarithmic(points.clone().map(|point| point.0));
        let y_axis = PlotAxis::for_values(points.map(|point| point.1));
        let x_title = format!("{} ({} axis)", curve.name, x_axis.scale_name());
        let y_title = format!("CPU time in µs ({} axis)", y_axis.scale_name());
        draw_head(&area, curve, measurement)?;
        let mut chart = ChartBuilder::on(&area)
            .margin(16)
            .margin_top(72)
            .x_label_area_size(46)
            .y_label_area_size(72)
            .build_cartesian_2d(x_axis, y_axis)
            .map_err(plot_error)?;
        chart
            .configure_mesh()
            .x_desc(x_title)
            .y_desc(y_title)
            .label_style(theme::font(12.0, theme::MUTED_TEXT))
            .axis_desc_style(theme::font(13.0, theme::TEXT))
            .axis_style(theme::MUTED_TEXT)
            .bold_line_style(theme::GRID)
            .light_line_style(theme::BACKGROUND)
            .draw()
            .map_err(plot_error)?;
        let colors = [theme::SERIES[2], theme::SERIES[1], theme::SERIES[0]];
        for (series, color) in curve.series.iter().zip(colors) {
            let points = series.points.iter().copied();
            let line = LineSeries::new(points, color.stroke_width(2)).point_size(3);
            let drawn = chart.draw_series(line).map_err(plot_error)?;
            drawn.label(series.label()).legend(move |(x, y)| {
                PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2))
            });
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .label_font(theme::font(12.0, theme::TEXT))
            .background_style(theme::BACKGROUND)
            .border_style(theme::GRID)
            .draw()
            .map_err(plot_error)?;
        area.present().map_err(plot_error)?;
    }
    Ok(theme::with_dark_colors(&svg))
}

fn draw_head(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    curve: &GrowthCurve<'_>,
    measurement: &str,
) -> anyhow::Result<()> {
    let title = format!("CPU time of a routing decision against {}", curve.name);
    let title = Text::new(title, (20, 34), theme::title(17.0));
    area.draw(&title).map_err(plot_error)?;
    let style = theme::text(12.0, theme::MUTED_TEXT, HPos::Left);
    let measurement = Text::new(measurement.to_owned(), (20, 54), style);
    area.draw(&measurement).map_err(plot_error)
}

/// Formats a number with three significant digits.
pub(super) fn number(value: f64) -> String {
    let digits = (2 - value.abs().max(1e-9).log10().floor() as i32).clamp(0, 4) as usize;
    format!("{value:.digits$}")
}

pub(super) fn plot_error<E: std::error::Error + Send + Sync>(error: E) -> anyhow::Error {
    anyhow!("{error}")
}
