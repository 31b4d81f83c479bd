//! Colours and text styles of the pictures. Browsers that prefer dark colours replace each colour.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// A colour and its replacement on dark backgrounds.
struct ThemeColor {
    light: RGBColor,
    dark: RGBColor,
}

pub(super) const BACKGROUND: RGBColor = RGBColor(0xFF, 0xFF, 0xFF);
pub(super) const TEXT: RGBColor = RGBColor(0x1F, 0x23, 0x28);
pub(super) const MUTED_TEXT: RGBColor = RGBColor(0x59, 0x63, 0x6E);
pub(super) const GRID: RGBColor = RGBColor(0xD8, 0xDE, 0xE4);
/// Colours of the series, the most important one last.
pub(super) const SERIES: [RGBColor; 3] = [
    RGBColor(0xA8, 0xB1, 0xBB),
    RGBColor(0xE0, 0x9B, 0x3D),
    RGBColor(0x0A, 0x69, 0xDA),
];

const COLORS: [ThemeColor; 7] = [
    ThemeColor {
        light: BACKGROUND,
        dark: RGBColor(0x0D, 0x11, 0x17),
    },
    ThemeColor {
        light: TEXT,
        dark: RGBColor(0xF0, 0xF6, 0xFC),
    },
    ThemeColor {
        light: MUTED_TEXT,
        dark: RGBColor(0x9D, 0xA7, 0xB3),
    },
    ThemeColor {
        light: GRID,
        dark: RGBColor(0x2F, 0x36, 0x3E),
    },
    ThemeColor {
        light: SERIES[0],
        dark: RGBColor(0x7D, 0x87, 0x93),
    },
    ThemeColor {
        light: SERIES[1],
        dark: RGBColor(0xD2, 0x99, 0x22),
    },
    ThemeColor {
        light: SERIES[2],
        dark: RGBColor(0x4A, 0x9E, 0xFF),
    },
];

/// Adds the dark colours to a drawing. They replace attributes, so renderers without style sheets
/// show the light colours.
pub(super) fn with_dark_colors(svg: &str) -> String {
    let hex = |RGBColor(red, green, blue): RGBColor| format!("#{red:02X}{green:02X}{blue:02X}");
    let rules: Vec<String> = COLORS
        .iter()
        .map(|ThemeColor { light, dark }| {
            let [light, dark] = [hex(*light), hex(*dark)];
            format!("[fill=\"{light}\"]{{fill:{dark}}} [stroke=\"{light}\"]{{stroke:{dark}}}")
        })
        .collect();
    let style = format!(
        "<style>\n@media (prefers-color-scheme: dark) {{\n{}\n}}\n</style>\n",
        rules.join("\n")
    );
    match svg.split_once(">\n") {
        Some((head, drawing)) => format!("{head}>\n{style}{drawing}"),
        None => svg.to_owned(),
    }
}

/// Ratio of the size of a font in plotters to its size in pixels.
const FONT_SCALE: f64 = 1.24;

/// Returns a font with a size in pixels.
pub(super) fn font(pixels: f64, color: RGBColor) -> TextStyle<'static> {
    ("sans-serif", pixels * FONT_SCALE)
        .into_font()
        .color(&color)
}

/// Returns a text style with a horizontal anchor. Texts stand on their baseline.
pub(super) fn text(pixels: f64, color: RGBColor, anchor: HPos) -> TextStyle<'static> {
    font(pixels, color).pos(Pos::new(anchor, VPos::Bottom))
}

/// Returns the text style of titles.
pub(super) fn title(pixels: f64) -> TextStyle<'static> {
    ("sans-serif", pixels * FONT_SCALE, FontStyle::Bold)
        .into_font()
        .color(&TEXT)
        .pos(Pos::new(HPos::Left, VPos::Bottom))
}
