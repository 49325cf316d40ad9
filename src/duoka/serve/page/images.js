// Pictures that a person attaches, as data URLs.

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
// Models look at far fewer pixels; what a phone's camera makes would only fill the request.
const MAX_SIDE_PIXELS = 2048;
const MAX_BYTES = 4 * 1024 * 1024;

export function imageFiles(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}

/** A data URL, made smaller where need be; fails where the browser can't read the picture. */
export async function readImage(file) {
  const bitmap = await createImageBitmap(file);
  try {
    const scale = Math.min(1, MAX_SIDE_PIXELS / Math.max(bitmap.width, bitmap.height));
    const asItIs = scale === 1 && file.size <= MAX_BYTES && TYPES.includes(file.type);
    return asItIs ? await dataUrl(file) : shrink(bitmap, scale);
  } finally {
    bitmap.close();
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function shrink(bitmap, scale) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}
