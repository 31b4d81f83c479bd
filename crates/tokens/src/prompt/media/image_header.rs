//! Image headers: the size, and whether Pillow opens the image as plain RGB. The engine converts
//! every other image, which changes its id.

/// Size and color mode of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ImageHeader {
    pub(super) width: u32,
    pub(super) height: u32,
    /// True if Pillow opens the image as RGB. `None` if that is unknown, as for rare formats.
    pub(super) is_rgb: Option<bool>,
}

/// Reads the header at the start of an image. Returns `None` if `head` is too short.
pub(super) fn read_header(head: &[u8]) -> Option<ImageHeader> {
    let size = imagesize::blob_size(head).ok()?;
    let is_rgb = match imagesize::image_type(head).ok()? {
        imagesize::ImageType::Png => is_rgb_png(head),
        imagesize::ImageType::Jpeg => Some(is_rgb_jpeg(head)?),
        imagesize::ImageType::Gif => Some(false),
        imagesize::ImageType::Webp => is_rgb_webp(head),
        imagesize::ImageType::Bmp => is_rgb_bmp(head),
        _ => None,
    };
    let width = u32::try_from(size.width).ok()?;
    let height = u32::try_from(size.height).ok()?;
    Some(ImageHeader {
        width,
        height,
        is_rgb,
    })
}

/// Reads the color type of the first chunk, where 2 is RGB. Returns `None` for 16-bit color,
/// because the engine's treatment of it was not verified.
fn is_rgb_png(head: &[u8]) -> Option<bool> {
    (head.get(12..16)? == b"IHDR").then_some(())?;
    match (head.get(24)?, head.get(25)?) {
        (16, 2) => None,
        (_, colour) => Some(*colour == 2),
    }
}

/// Reads the color depth. A bitmap of 24 bits is RGB, and other depths are unknown.
fn is_rgb_bmp(head: &[u8]) -> Option<bool> {
    (head.get(28..30)? == [24, 0]).then_some(true)
}

/// Reads the number of components of the frame: three are RGB, one is grayscale, and four are CMYK.
/// Returns `None` if `head` ends before the frame.
fn is_rgb_jpeg(head: &[u8]) -> Option<bool> {
    let mut rest = head.get(2..)?;
    loop {
        let marker = match rest {
            [0xff, 0xff, ..] => {
                rest = &rest[1..];
                continue;
            }
            [0xff, marker, ..] => *marker,
            _ => return None,
        };
        // A marker of this range starts a frame, except three markers that start tables.
        if matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) {
            return rest.get(9).map(|&components| components == 3);
        }
        let length = usize::from(u16::from_be_bytes([*rest.get(2)?, *rest.get(3)?]));
        rest = rest.get(2 + length..)?;
    }
}

/// Reads the alpha flag of the simple formats. An image with an alpha channel is not RGB.
fn is_rgb_webp(head: &[u8]) -> Option<bool> {
    match head.get(12..16)? {
        b"VP8 " => Some(true),
        // The alpha flag follows 28 bits of size.
        b"VP8L" => head.get(24).map(|&byte| byte & 0x10 == 0),
        _ => None,
    }
}
