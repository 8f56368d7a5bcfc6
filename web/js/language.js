// The canvas' language.
import { app } from "../../../scripts/app.js";

export const language = () => String(app.extensionManager?.setting?.get?.("Comfy.Locale") ?? "en").slice(0, 2);
