//! What the header of an image says: how large it is, and whether Pillow opens it as plain RGB, because every other image
//! is converted and then named differently.

/// What the header of an image says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Picture {
    pub(super) width: u32,
    pub(super) height: u32,
    /// Whether it is opened as RGB; unknown of formats that are seldom sent.
    pub(super) is_rgb: Option<bool>,
}

/// Reads the beginning of an image, or all of it; `None` where that does not suffice.
pub(super) fn read(head: &[u8]) -> Option<Picture> {
    let size = imagesize::blob_size(head).ok()?;
    let is_rgb = match imagesize::image_type(head).ok()? {
        imagesize::ImageType::Png => png(head),
        imagesize::ImageType::Jpeg => Some(jpeg(head)?),
        imagesize::ImageType::Gif => Some(false),
        imagesize::ImageType::Webp => webp(head),
        imagesize::ImageType::Bmp => bmp(head),
        _ => None,
    };
    let (width, height) = (
        u32::try_from(size.width).ok()?,
        u32::try_from(size.height).ok()?,
    );
    Some(Picture {
        width,
        height,
        is_rgb,
    })
}

/// The colour type of the first chunk: 2 is RGB. Of deep colours nobody has asked an engine.
fn png(head: &[u8]) -> Option<bool> {
    (head.get(12..16)? == b"IHDR").then_some(())?;
    match (head.get(24)?, head.get(25)?) {
        (16, 2) => None,
        (_, colour) => Some(*colour == 2),
    }
}

/// A bitmap of 24 bits is RGB.
fn bmp(head: &[u8]) -> Option<bool> {
    (head.get(28..30)? == [24, 0]).then_some(true)
}

/// The number of components of the frame: three are RGB, one is grey and four are CMYK. `None` if the frame lies behind what is
/// shown.
fn jpeg(head: &[u8]) -> Option<bool> {
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
        // Start of frame, but for the tables among these numbers.
        if matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) {
            return rest.get(9).map(|&components| components == 3);
        }
        let length = usize::from(u16::from_be_bytes([*rest.get(2)?, *rest.get(3)?]));
        rest = rest.get(2 + length..)?;
    }
}

/// Whether there is transparency, of the simple formats.
fn webp(head: &[u8]) -> Option<bool> {
    match head.get(12..16)? {
        b"VP8 " => Some(true),
        // The flag stands behind 28 bits of size.
        b"VP8L" => head.get(24).map(|&byte| byte & 0x10 == 0),
        _ => None,
    }
}
